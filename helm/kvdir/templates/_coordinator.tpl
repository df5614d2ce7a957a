{{/* A PodDisruptionBudget is made: as asked, or when a drain would leave somebody. */}}
{{- define "kvdir.coordinator.pdb" -}}
{{- $wish := .Values.coordinator.pdb.enabled -}}
{{- if kindIs "invalid" $wish | ternary (gt (int .Values.coordinator.replicas) 1) $wish -}}yes{{- end -}}
{{- end }}

{{- define "kvdir.coordinator.graceSeconds" -}}
{{- $grace := hasKey .Values.coordinator.config "grace_s" | ternary .Values.coordinator.config.grace_s 5 -}}
{{- add .Values.coordinator.preStopSeconds (ceil $grace) 5 -}}
{{- end }}

{{/* Kubernetes 1.29 knows `sleep` but has it switched off, and then drops the hook without a word. */}}
{{- define "kvdir.preStop" -}}
{{- $seconds := .Values.coordinator.preStopSeconds -}}
{{- if semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version -}}
{sleep: {seconds: {{ $seconds }}}}
{{- else -}}
{exec: {command: [sleep, {{ $seconds | quote }}]}}
{{- end -}}
{{- end }}

{{/* Most memory for the index, where the values do not say: three quarters of what there is for it. Nothing: no bound. A directory without
   one would grow until the kernel kills the coordinator, and the others, which have the same one, with it. */}}
{{- define "kvdir.coordinator.indexBytes" -}}
{{- $c := .Values.coordinator -}}
{{- $room := gt (int $c.lookupWorkers) 0 | ternary $c.lookupShm (default dict $c.resources.limits).memory -}}
{{- if and $room (eq $c.store.type "memory") -}}
{{- mul (div (include "kvdir.bytes" $room | int64) 4) 3 -}}
{{- end -}}
{{- end }}

{{- define "kvdir.agent.graceSeconds" -}}
{{- $grace := hasKey .Values.agent.config "grace_s" | ternary .Values.agent.config.grace_s 10 -}}
{{- add (ceil $grace) 5 -}}
{{- end }}

{{- define "kvdir.agent.configSum" -}}
{{- cat (include "kvdir.agent.toml" .) (toJson .Values.agent.namespaces) | sha256sum | trunc 16 | quote -}}
{{- end }}

{{/* Call with the values of the workload. */}}
{{- define "kvdir.placement" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
