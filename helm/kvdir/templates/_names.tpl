{{/* Names, labels and images. Names leave room for what Kubernetes appends: a pod of the StatefulSet stays below 63 characters. */}}

{{- define "kvdir.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "kvdir.coordinator.name" -}}
{{ include "kvdir.fullname" . }}-coordinator
{{- end }}

{{- define "kvdir.coordinator.headless" -}}
{{ include "kvdir.fullname" . }}-coordinator-headless
{{- end }}

{{- define "kvdir.agent.name" -}}
{{ include "kvdir.fullname" . }}-agent
{{- end }}

{{- define "kvdir.policy.name" -}}
{{ include "kvdir.fullname" . }}-policy
{{- end }}

{{/* Call with (list . "coordinator"). */}}
{{- define "kvdir.selector" -}}
{{- $ := index . 0 -}}
app.kubernetes.io/name: {{ default $.Chart.Name $.Values.nameOverride | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ $.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "kvdir.labels" -}}
{{- $ := index . 0 -}}
helm.sh/chart: {{ printf "%s-%s" $.Chart.Name $.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/version: {{ $.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $.Release.Service }}
app.kubernetes.io/part-of: kvdir
{{ include "kvdir.selector" . }}
{{- with $.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What every pod with an agent carries, engines' pods too: monitors, network policies and people find it by this. */}}
{{- define "kvdir.agent.mark" -}}
kvdir/agent: {{ include "kvdir.fullname" . | quote }}
{{- end }}

{{- define "kvdir.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default .Chart.AppVersion $image.tag }}
{{- end -}}
{{- end }}

{{- define "kvdir.any" -}}
{{ eq .Values.ipFamily "IPv6" | ternary "[::]" "0.0.0.0" }}
{{- end }}

{{- define "kvdir.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Probes by gRPC on a plaintext port that says nothing else (kubelet speaks no mTLS). Call with (dict "port" "startupPeriods"). */}}
{{- define "kvdir.probes" -}}
startupProbe:
  grpc: {port: {{ .port }}, service: startup}
  periodSeconds: 2
  failureThreshold: {{ .startupPeriods }}
livenessProbe:
  grpc: {port: {{ .port }}, service: liveness}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  grpc: {port: {{ .port }}, service: readiness}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
{{- end }}
