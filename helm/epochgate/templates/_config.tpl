{{- /* Refuses values that render but could not work. */}}
{{- define "epochgate.validate" -}}
{{- $upstream := .Values.config.upstream | default dict }}
{{- if not $upstream.url }}
{{- fail "config.upstream.url is not set: name the MCP server, such as http://mcp-server:3000" }}
{{- end }}
{{- range $key, $instead := dict "listen" "ports.http" "store" "store" "drain" "drain" }}
{{- if hasKey $.Values.config $key }}
{{- fail (printf "config.%s: the chart writes this key; set the value %s instead" $key $instead) }}
{{- end }}
{{- end }}
{{- if hasKey (.Values.config.admin | default dict) "listen" }}
{{- fail "config.admin.listen: the chart writes this key; set the value ports.admin instead" }}
{{- end }}
{{- if regexMatch "://[^/]*@" .Values.store.url }}
{{- fail "store.url holds a credential: put the URL into a Secret and name it in store.existingSecret" }}
{{- end }}
{{- $many := or .Values.autoscaling.enabled (gt (int .Values.replicas) 1) }}
{{- $private := and (not .Values.store.existingSecret.name) (regexMatch "^(memory|sqlite):" .Values.store.url) }}
{{- if and (eq .Values.mode "gateway") $many $private }}
{{- fail (printf "%s with store.url %s: each replica would know only its own sessions and refuse the resumes of all others; name a Valkey that they share in store.existingSecret or store.url, or set replicas to 1 and autoscaling.enabled to false" (ternary "autoscaling.enabled" (printf "replicas: %d" (int .Values.replicas)) .Values.autoscaling.enabled) .Values.store.url) }}
{{- end }}
{{- $workers := int (.Values.config.workers | default 1) }}
{{- if and (gt $workers 1) $private }}
{{- fail (printf "config.workers: %d with store.url %s: each worker would know only its own sessions; name a Valkey that they share in store.existingSecret or store.url, or leave config.workers out" $workers .Values.store.url) }}
{{- end }}
{{- if .Values.serviceMonitor.enabled }}
{{- if and (eq .Values.mode "gateway") .Values.networkPolicy.enabled (not .Values.networkPolicy.monitoring) }}
{{- fail "serviceMonitor.enabled, but networkPolicy.monitoring is empty: name the peers that may scrape the admin port, such as [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]" }}
{{- end }}
{{- if and (eq .Values.mode "sidecar") (not .Values.sidecar.selectorLabels) }}
{{- fail "serviceMonitor.enabled, but sidecar.selectorLabels is empty: give it the labels of the pods that have the sidecar" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "epochgate.config" -}}
{{- $listen := dict "listen" (printf "0.0.0.0:%d" (int .Values.ports.http)) "admin" (dict "listen" (printf "0.0.0.0:%d" (int .Values.ports.admin))) }}
{{- $drain := dict "drain" (dict "grace" (printf "%ds" (int .Values.drain.graceSeconds)) "window" (printf "%ds" (int .Values.drain.windowSeconds))) }}
{{- $store := ternary dict (dict "store" (dict "url" .Values.store.url)) (ne .Values.store.existingSecret.name "") }}
{{- mergeOverwrite (deepCopy .Values.config) $listen $drain $store | toYaml }}
{{- end }}

{{- /* Policies are taken over by running pods; what else changes needs new ones. */}}
{{- define "epochgate.restartChecksum" -}}
{{- omit (include "epochgate.config" . | fromYaml) "policies" | toYaml | sha256sum }}
{{- end }}

{{- define "epochgate.drainSeconds" -}}
{{- add (int .Values.drain.graceSeconds) (int .Values.drain.windowSeconds) }}
{{- end }}
