{{- /* The container, as an item of a list. As a sidecar it is for initContainers: it starts before the server and ends after it. */}}
{{- define "epochgate.container" -}}
{{- include "epochgate.validate" . -}}
- name: epochgate
  image: {{ include "epochgate.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args: [serve, --config, /etc/epochgate/epochgate.yaml]
  {{- if eq .Values.mode "sidecar" }}
  restartPolicy: Always
  {{- end }}
  {{- if or .Values.store.existingSecret.name .Values.extraEnv }}
  env:
    {{- with .Values.store.existingSecret }}
    {{- if .name }}
    - name: EPOCHGATE_STORE__URL
      valueFrom:
        secretKeyRef:
          name: {{ .name }}
          key: {{ .key }}
    {{- end }}
    {{- end }}
    {{- with .Values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  ports:
    - name: epochgate
      containerPort: {{ .Values.ports.http }}
    - name: epochgate-admin
      containerPort: {{ .Values.ports.admin }}
  startupProbe:
    httpGet: {path: /livez, port: epochgate-admin}
    periodSeconds: 1
    failureThreshold: 60
  livenessProbe:
    httpGet: {path: /livez, port: epochgate-admin}
    timeoutSeconds: 3
  readinessProbe:
    httpGet: {path: /readyz, port: epochgate-admin}
    periodSeconds: 2
    timeoutSeconds: 2
    failureThreshold: 1
  {{- if eq .Values.mode "sidecar" }}
  lifecycle:
    preStop:
      # The pod's end begins here; SIGTERM comes only when the server has ended, too late for its streams.
      exec:
        command:
          - /opt/epochgate/bin/python
          - -c
          - import http.client; c = http.client.HTTPConnection("127.0.0.1", {{ .Values.ports.admin }}, timeout=5); c.request("POST", "/-/drain"); c.getresponse()
  {{- end }}
  {{- with .Values.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "epochgate.securityContext" . | nindent 4 }}
  volumeMounts:
    - name: epochgate-config
      mountPath: /etc/epochgate     # the folder: a file that is mounted alone never changes
      readOnly: true
    {{- with .Values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "epochgate.securityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
readOnlyRootFilesystem: true
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "epochgate.volumes" -}}
- name: epochgate-config
  configMap:
    name: {{ include "epochgate.fullname" . }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}
