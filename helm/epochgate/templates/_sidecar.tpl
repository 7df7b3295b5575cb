{{- /*
For the chart of a server that has this chart as a dependency, with `epochgate.mode: sidecar` in its values. All take
`.Subcharts.epochgate`; docs/sidecar.md and helm/examples/legacy-server show where each goes.
*/}}

{{- /* For spec.initContainers. */}}
{{- define "epochgate.sidecar.container" -}}
{{- if ne .Values.mode "sidecar" }}
{{- fail "epochgate.sidecar.container: set epochgate.mode to sidecar in the values of the chart that includes it" }}
{{- end }}
{{- include "epochgate.container" . }}
{{- end }}

{{- /* For spec.volumes. */}}
{{- define "epochgate.sidecar.volumes" -}}
{{- include "epochgate.volumes" . }}
{{- end }}

{{- /* For metadata.annotations of the pod: a new pod where the configuration needs one. */}}
{{- define "epochgate.sidecar.annotations" -}}
checksum/epochgate: {{ include "epochgate.restartChecksum" . }}
{{- end }}

{{- /* For lifecycle.preStop of the server's container: it serves on until its streams have ended. */}}
{{- define "epochgate.sidecar.serverPreStop" -}}
sleep:
  seconds: {{ include "epochgate.drainSeconds" . }}
{{- end }}

{{- /* For spec.terminationGracePeriodSeconds: the drain, then the server, then the sidecar. */}}
{{- define "epochgate.sidecar.terminationGracePeriodSeconds" -}}
{{- add (include "epochgate.drainSeconds" . | int) (int .Values.sidecar.serverShutdownSeconds) 5 }}
{{- end }}
