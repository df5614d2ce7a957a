{{/* A PodDisruptionBudget is made: as asked, or when a drain would leave somebody. */}}
{{- define "kvdir.coordinator.pdb" -}}
{{- $wish := .Values.coordinator.pdb.enabled -}}
{{- if kindIs "invalid" $wish | ternary (gt (int .Values.coordinator.replicas) 1) $wish -}}yes{{- end -}}
{{- end }}

{{- define "kvdir.coordinator.graceSeconds" -}}
{{- $grace := hasKey .Values.coordinator.config "grace_s" | ternary .Values.coordinator.config.grace_s 5 -}}
{{- add .Values.coordinator.preStopSeconds (ceil $grace) 5 -}}
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
