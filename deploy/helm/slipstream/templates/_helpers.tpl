{{- define "slipstream.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 38 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 38 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "slipstream.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "slipstream.selector" . }}
{{- end -}}

{{- define "slipstream.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}{{ include "slipstream.fullname" . }}{{- else -}}{{ default "default" .Values.serviceAccount.name }}{{- end -}}
{{- end -}}

{{/* Where the gateway runs: its own pod, or the Ray head. */}}
{{- define "slipstream.gatewaySelector" -}}
{{ include "slipstream.selector" . }}
app.kubernetes.io/component: {{ eq .Values.gateway.kind "Deployment" | ternary "gateway" "head" }}
{{- end -}}

{{/* The configuration file. What the chart sets wins: values.schema.json keeps these keys out of .Values.config. */}}
{{- define "slipstream.config" -}}
{{- $set := dict
  "pair" .Values.model.pair
  "mode" "split"
  "listen" "0.0.0.0:50051"
  "http" (.Values.gateway.http | ternary "0.0.0.0:8000" "")
  "metrics" (printf "0.0.0.0:%d" (int .Values.monitoring.port))
  "context_workers" (int .Values.context.replicas)
  "generation_workers" (int .Values.generation.replicas)
  "drain_s" .Values.gateway.drainSeconds
  "startup_timeout_s" .Values.gateway.startupSeconds
-}}
{{- /* One file for both: the supervisor opens the registry and keeps the workers, gateways attach to it. */ -}}
{{- if eq .Values.gateway.kind "Deployment" -}}
{{- $_ := set $set "registry" "0.0.0.0:50052" -}}
{{- $_ := set $set "keep_workers" true -}}
{{- $_ := set $set "attach" (printf "%s-registry:50052" (include "slipstream.fullname" .)) -}}
{{- end -}}
{{- if .Values.gateway.tokens.existingSecret -}}
{{- $_ := set $set "token_file" (printf "/etc/slipstream/tokens/%s" .Values.gateway.tokens.key) -}}
{{- end -}}
{{- with .Values.gateway.tls -}}
{{- if .existingSecret -}}
{{- $_ := set $set "tls_cert_file" "/etc/slipstream/tls/tls.crt" -}}
{{- $_ := set $set "tls_key_file" "/etc/slipstream/tls/tls.key" -}}
{{- if .clientCaKey -}}{{- $_ := set $set "tls_client_ca_file" (printf "/etc/slipstream/tls/%s" .clientCaKey) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- /* Values as JSON are TOML too. Helm's own toToml makes every number a float, which an integer key refuses. */ -}}
{{- range $key, $value := merge $set .Values.config }}
{{- if not (kindIs "invalid" $value) }}
{{- $key }} = {{ toRawJson $value }}
{{ end -}}
{{- end }}
{{- range $role := list "context" "generation" }}
[{{ $role }}]
tensor_parallel_size = {{ get (get $.Values $role) "tensorParallelSize" }}
{{- end }}
[placement]
role_label = "slipstream/role"
domain_label = {{ toRawJson .Values.placement.domainLabel }}
cpus = {{ .Values.cpusPerWorker }}
gpus = {{ .Values.gpusPerWorker }}
timeout_s = {{ .Values.placement.timeoutSeconds }}
{{- end -}}

{{/* Pods that Prometheus scrapes. */}}
{{- define "slipstream.scraped" -}}
slipstream/scraped: "true"
{{- end -}}

{{/* Ray's authentication, for containers that the KubeRay operator does not touch. */}}
{{- define "slipstream.rayAuthEnv" -}}
- name: RAY_AUTH_MODE
  value: {{ .Values.ray.auth.mode }}
{{- if eq .Values.ray.auth.mode "token" }}
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ default (include "slipstream.fullname" .) .Values.ray.auth.existingSecret }}
      key: auth_token
{{- end }}
{{- end -}}

{{/* What every container of ours gets: nothing to write to but emptyDirs, no rights. Argument: extra capabilities. */}}
{{- define "slipstream.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- with . }}
  add: {{ toJson . }}
  {{- end }}
{{- end -}}

{{- define "slipstream.env" -}}
- {name: HOME, value: /tmp}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_worker_niceness, value: "0"}
# A node that is gone is noticed after some seconds, instead of a minute.
- {name: RAY_health_check_period_ms, value: "1000"}
- {name: RAY_health_check_timeout_ms, value: "1500"}
- {name: RAY_health_check_failure_threshold, value: "3"}
{{- end -}}

{{/* What is mounted where Ray runs. */}}
{{- define "slipstream.mounts" -}}
- {name: shared-mem, mountPath: /dev/shm}
{{ include "slipstream.plainMounts" . }}
{{- end -}}

{{- define "slipstream.plainMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .Values.model.volume }}
- {name: model, mountPath: {{ .Values.model.mountPath }}, readOnly: true}
{{- end }}
{{- end -}}

{{/* Argument: root, shmSize. */}}
{{- define "slipstream.volumes" -}}
- name: shared-mem
  emptyDir: {medium: Memory, sizeLimit: {{ .shmSize }}}
{{ include "slipstream.plainVolumes" .root }}
{{- end -}}

{{- define "slipstream.plainVolumes" -}}
- name: tmp
  emptyDir: {}
{{- with .Values.model.volume }}
- name: model
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "slipstream.secretMounts" -}}
{{- if .Values.gateway.tokens.existingSecret }}
- {name: tokens, mountPath: /etc/slipstream/tokens, readOnly: true}
{{- end }}
{{- if .Values.gateway.tls.existingSecret }}
- {name: tls, mountPath: /etc/slipstream/tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "slipstream.secretVolumes" -}}
{{- with .Values.gateway.tokens.existingSecret }}
- name: tokens
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with .Values.gateway.tls.existingSecret }}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* Where a pod may run. Argument: the group's values. */}}
{{- define "slipstream.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* A group's resources with its GPUs and its RDMA device. Arguments: root, group. */}}
{{- define "slipstream.workerResources" -}}
{{- $limits := dict -}}
{{- if .root.Values.gpusPerWorker -}}{{- $_ := set $limits .root.Values.gpuResource (mul .root.Values.gpusPerWorker .group.tensorParallelSize | toString) -}}{{- end -}}
{{- if .group.rdma.enabled -}}{{- $_ := set $limits .group.rdma.resource "1" -}}{{- end -}}
{{- toYaml (merge (dict "limits" $limits) (deepCopy .group.resources)) -}}
{{- end -}}
