{{/* Where certificates come from: tls.crt, tls.key and ca.crt in /etc/kvdir/tls, whatever the mode; the daemons follow changes of the files. */}}

{{- define "kvdir.tls.serverName" -}}
{{ default (include "kvdir.fullname" .) .Values.tls.serverName }}
{{- end }}

{{/* Call with (list . "coordinator"). */}}
{{- define "kvdir.tls.secretName" -}}
{{- $ := index . 0 -}}
{{- if eq $.Values.tls.mode "secret" -}}
{{ get $.Values.tls.secret (index . 1) }}
{{- else -}}
{{ include "kvdir.fullname" $ }}-{{ index . 1 }}-tls
{{- end -}}
{{- end }}

{{/* Call with (list . "agent" "volume name" file mode). */}}
{{- define "kvdir.tls.volume" -}}
{{- $ := index . 0 -}}
{{- if eq $.Values.tls.mode "spiffe" }}
- name: {{ index . 2 }}
  csi:
    driver: {{ $.Values.tls.spiffe.driver }}
    readOnly: true
    volumeAttributes:
      {{ $.Values.tls.spiffe.driver }}/fs-group: {{ $.Values.agent.runAsUser | toString | quote }}
{{- else if ne $.Values.tls.mode "none" }}
- name: {{ index . 2 }}
  secret:
    secretName: {{ include "kvdir.tls.secretName" . }}
    defaultMode: {{ index . 3 }}
{{- end }}
{{- end }}
