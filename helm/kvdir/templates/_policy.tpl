{{/* The policy's volume, of a ConfigMap made here or of a Secret that exists. Call with (list . "volume name" file mode). */}}
{{- define "kvdir.policy.volume" -}}
{{- $ := index . 0 -}}
{{- if $.Values.policy.secretName }}
- name: {{ index . 1 }}
  secret: {secretName: {{ $.Values.policy.secretName }}, defaultMode: {{ index . 2 }}}
{{- else if $.Values.policy.toml }}
- name: {{ index . 1 }}
  configMap: {name: {{ include "kvdir.policy.name" $ }}}
{{- end }}
{{- end }}
