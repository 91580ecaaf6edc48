{{/* What the schema cannot say: values that would render, and then fail or stand still in the cluster. */}}
{{- define "slipstream.checks" -}}
{{- include "slipstream.checkName" . -}}
{{- include "slipstream.checkModel" . -}}
{{- include "slipstream.checkGateway" . -}}
{{- range $where, $labels := dict
  "gateway.podLabels" .Values.gateway.podLabels "supervisor.podLabels" .Values.supervisor.podLabels
  "ray.head.podLabels" .Values.ray.head.podLabels "context.podLabels" .Values.context.podLabels
  "generation.podLabels" .Values.generation.podLabels "context.labels" .Values.context.labels
  "generation.labels" .Values.generation.labels -}}
{{- range $key, $_ := $labels -}}
{{- if regexMatch "^(app\\.kubernetes\\.io/(name|instance|component)|slipstream/.*)$" $key -}}
{{- fail (printf "%s: the label %s is the chart's own, which its selectors look for" $where $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $role := list "context" "generation" -}}
{{- include "slipstream.checkGroup" (dict "root" $ "role" $role) -}}
{{- end -}}
{{- end -}}

{{/* Services and the operator want DNS labels; a RayJob's name is nine characters longer, and has 47 at most. */}}
{{- define "slipstream.checkName" -}}
{{- $fullname := include "slipstream.fullname" . -}}
{{- if not (and (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $fullname) (le (len $fullname) 38)) -}}
{{- fail (printf "objects would be named %q: a name must begin with a letter, hold letters, digits and dashes, and be at most 38 long; choose another release name, or set fullnameOverride" $fullname) -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.checkModel" -}}
{{- $below := printf "%s/" (trimSuffix "/" .Values.model.mountPath) -}}
{{- $mounted := false -}}
{{- range splitList ":" .Values.model.pair -}}{{- if hasPrefix $below . -}}{{- $mounted = true -}}{{- end -}}{{- end -}}
{{- if and $mounted (not .Values.model.volume) -}}
{{- fail (printf "model.pair %q names paths below model.mountPath, where nothing is mounted: set model.volume" .Values.model.pair) -}}
{{- else if and .Values.model.volume (not $mounted) -}}
{{- fail (printf "model.volume is mounted at %s, and model.pair %q names nothing below it: write TARGET:DRAFTER paths that begin with %s" .Values.model.mountPath .Values.model.pair $below) -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.checkGateway" -}}
{{- with .Values.gateway -}}
{{- if and .autoscaling.enabled (ne .kind "Deployment") -}}
{{- fail "gateway.autoscaling needs gateway.kind=Deployment: a job is one gateway" -}}
{{- end -}}
{{- if and .autoscaling.enabled (gt (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas)) -}}
{{- fail (printf "gateway.autoscaling: minReplicas <= maxReplicas must hold, got %d, %d" (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas)) -}}
{{- end -}}
{{- if and .tls.clientCaKey (not .tls.existingSecret) -}}
{{- fail "gateway.tls.clientCaKey needs gateway.tls.existingSecret: without it nobody is asked for a certificate" -}}
{{- end -}}
{{- if and .http (eq (int .service.grpcPort) (int .service.httpPort)) -}}
{{- fail (printf "gateway.service: grpcPort and httpPort must differ, got %d twice" (int .service.grpcPort)) -}}
{{- end -}}
{{- end -}}
{{- if has (int .Values.monitoring.port) (list 6379 8000 8080 8265 10001 50051 50052 52365) -}}
{{- fail (printf "monitoring.port %d is taken in the pods by Ray, a door or the registry: choose another" (int .Values.monitoring.port)) -}}
{{- end -}}
{{- if and .Values.config.otel_endpoint .Values.networkPolicy.enabled (not .Values.networkPolicy.egress) -}}
{{- fail "config.otel_endpoint: the NetworkPolicy lets nothing out to a collector; name it in networkPolicy.egress" -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.checkGroup" -}}
{{- $group := get .root.Values .role -}}
{{- if or (gt (int $group.minReplicas) (int $group.replicas)) (gt (int $group.replicas) (int $group.maxReplicas)) -}}
{{- fail (printf "%s: minReplicas <= replicas <= maxReplicas must hold, got %d, %d, %d" .role (int $group.minReplicas) (int $group.replicas) (int $group.maxReplicas)) -}}
{{- end -}}
{{- /* As KubeRay counts the CPUs of a Ray node: the limit, or else the request, rounded up. */ -}}
{{- $cpu := dig "requests" "cpu" "" $group.resources | toString -}}
{{- $cpu = dig "limits" "cpu" $cpu $group.resources | toString -}}
{{- if $cpu -}}
{{- $cpus := hasSuffix "m" $cpu | ternary (divf (trimSuffix "m" $cpu | float64) 1000) (float64 $cpu) | ceil -}}
{{- $ranks := int $group.tensorParallelSize -}}
{{- if gt (mulf $ranks .root.Values.cpusPerWorker) $cpus -}}
{{- $each := gt $ranks 1 | ternary (printf "of %d ranks takes cpusPerWorker %d each" $ranks (int .root.Values.cpusPerWorker)) (printf "takes cpusPerWorker %d" (int .root.Values.cpusPerWorker)) -}}
{{- fail (printf "%s: a worker %s, and Ray sees %v in its pod (%s.resources)" .role $each $cpus .role) -}}
{{- end -}}
{{- end -}}
{{- end -}}
