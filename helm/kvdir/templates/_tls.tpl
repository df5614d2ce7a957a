{{/* Where certificates come from: tls.crt, tls.key and ca.crt in /etc/kvdir/tls, whatever the mode; daemons follow changes of the files. */}}

{{- define "kvdir.tls.serverName" -}}
{{ default (include "kvdir.fullname" .) .Values.tls.serverName }}
{{- end }}

{{/* The DNS names that a certificate must hold. Call with (list . "coordinator"). With csi an agent has a name of its own, and not that
   of coordinators: nobody but one of them passes for one. The driver expands ${...} itself. */}}
{{- define "kvdir.tls.dnsNames" -}}
{{- $ := index . 0 -}}
{{- $names := list (include "kvdir.tls.serverName" $) -}}
{{- if and (eq (index . 1) "agent") (eq $.Values.tls.mode "csi") -}}
{{- $names = list (printf "${POD_NAME}.${POD_UID}.%s" (include "kvdir.tls.serverName" $)) -}}
{{- end -}}
{{- if eq (index . 1) "coordinator" -}}
{{- range $service := list (include "kvdir.coordinator.name" $) (include "kvdir.coordinator.headless" $) -}}
{{- $name := printf "%s.%s" $service $.Release.Namespace -}}
{{- $names = append $names $name -}}
{{- $names = append $names (printf "%s.svc" $name) -}}
{{- $names = append $names (printf "%s.svc.%s" $name $.Values.clusterDomain) -}}
{{- end -}}
{{- end -}}
{{- toJson $names -}}
{{- end }}

{{/* Who it is, for a policy. Call with (list . "coordinator"). */}}
{{- define "kvdir.tls.identity" -}}
{{- $ := index . 0 -}}
spiffe://{{ $.Values.tls.certManager.trustDomain }}/ns/{{ $.Release.Namespace }}/{{ include "kvdir.fullname" $ }}/{{ index . 1 }}
{{- end }}

{{- define "kvdir.tls.secretName" -}}
{{- $ := index . 0 -}}
{{- if eq $.Values.tls.mode "secret" -}}
{{ get $.Values.tls.secret (index . 1) }}
{{- else -}}
{{ include "kvdir.fullname" $ }}-{{ index . 1 }}-tls
{{- end -}}
{{- end }}

{{/* Of the container: for the commands `kvdir` and `peer-agent` that somebody runs in it, and for the coordinator itself. */}}
{{- define "kvdir.tls.env" -}}
{{- if ne .Values.tls.mode "none" }}
- {name: KVDIR_TLS_CERT, value: /etc/kvdir/tls/tls.crt}
- {name: KVDIR_TLS_KEY, value: /etc/kvdir/tls/tls.key}
- {name: KVDIR_TLS_CA, value: /etc/kvdir/tls/ca.crt}
- {name: KVDIR_TLS_SERVER_NAME, value: {{ include "kvdir.tls.serverName" . | quote }}}
{{- end }}
{{- end }}

{{/* Call with (list . "agent" "volume name" mode of files). With csi the identity ends in the node's name in the directory, so that
   a policy can hold an agent to it: nodes = ["{node}"]. */}}
{{- define "kvdir.tls.volume" -}}
{{- $ := index . 0 -}}
{{- if eq $.Values.tls.mode "csi" }}
- name: {{ index . 2 }}
  csi:
    driver: csi.cert-manager.io
    readOnly: true
    volumeAttributes:
      csi.cert-manager.io/issuer-name: {{ $.Values.tls.certManager.issuerName | quote }}
      csi.cert-manager.io/issuer-kind: {{ $.Values.tls.certManager.issuerKind | quote }}
      csi.cert-manager.io/issuer-group: {{ $.Values.tls.certManager.issuerGroup | quote }}
      csi.cert-manager.io/duration: {{ $.Values.tls.certManager.duration }}
      csi.cert-manager.io/renew-before: {{ $.Values.tls.certManager.renewBefore }}
      csi.cert-manager.io/dns-names: {{ include "kvdir.tls.dnsNames" (list $ (index . 1)) | fromJsonArray | join "," }}
      csi.cert-manager.io/uri-sans: {{ include "kvdir.tls.identity" (list $ (index . 1)) }}/${POD_NAME}.${POD_UID}
      csi.cert-manager.io/key-usages: digital signature,server auth,client auth
      {{- with eq (index . 1) "agent" | ternary (int64 $.Values.agent.runAsUser) 65532 }}
      csi.cert-manager.io/fs-group: {{ toString . | quote }}
      {{- end }}
{{- else if ne $.Values.tls.mode "none" }}
- name: {{ index . 2 }}
  secret:
    secretName: {{ include "kvdir.tls.secretName" . }}
    defaultMode: {{ index . 3 }}
{{- end }}
{{- end }}
