{{/* Files of settings (docs/configuration.md) in TOML. JSON's texts, numbers, truth values and lists are TOML's as well. */}}

{{- define "kvdir.toml" -}}
{{- range $key := keys . | sortAlpha }}
{{- $value := get $ $key }}
{{- if kindIs "map" $value }}
{{ $key }} = { {{- range $index, $name := keys $value | sortAlpha }}{{ if $index }}, {{ end }}{{ toJson $name }} = {{ toJson (get $value $name) }}{{ end -}} }
{{- else }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{- end }}

{{/* Settings that both daemons get from `insecure` and `policy`, as JSON. */}}
{{- define "kvdir.config.common" -}}
{{- $out := dict "insecure" .Values.insecure -}}
{{- if or .Values.policy.toml .Values.policy.secretName -}}
{{- $_ := set $out "policy" "/etc/kvdir/policy/policy.toml" -}}
{{- end -}}
{{- toJson $out -}}
{{- end }}

{{- define "kvdir.coordinator.owned" -}}
{{- $any := include "kvdir.any" . -}}
{{- $out := include "kvdir.config.common" . | fromJson -}}
{{- $_ := set $out "listen" (printf "%s:7400" $any) -}}
{{- $_ := set $out "http_listen" (printf "%s:7401" $any) -}}
{{- $_ := set $out "page_listen" (.Values.coordinator.page.enabled | ternary "127.0.0.1:7402" "") -}}
{{- $_ := set $out "health_listen" (printf "%s:7403" $any) -}}
{{- $_ := set $out "indexer_listen" (.Values.coordinator.indexer.enabled | ternary (printf "%s:7404" $any) "") -}}
{{- $_ := set $out "lookup_workers" .Values.coordinator.lookupWorkers -}}
{{- $_ := set $out "checkpoint" (.Values.coordinator.checkpoint.enabled | ternary "/var/lib/kvdir/directory" "") -}}
{{- toJson $out -}}
{{- end }}

{{- define "kvdir.agent.owned" -}}
{{- $any := include "kvdir.any" . -}}
{{- $agent := .Values.agent -}}
{{- $out := include "kvdir.config.common" . | fromJson -}}
{{- if ne .Values.tls.mode "none" -}}
{{- $_ := set $out "tls_cert" "/etc/kvdir/tls/tls.crt" -}}
{{- $_ := set $out "tls_key" "/etc/kvdir/tls/tls.key" -}}
{{- $_ := set $out "tls_ca" "/etc/kvdir/tls/ca.crt" -}}
{{- $_ := set $out "tls_server_name" (include "kvdir.tls.serverName" .) -}}
{{- if eq .Values.tls.mode "csi" -}}
{{- $_ := set $out "tls_peer_name" (printf "{node}.%s" (include "kvdir.tls.serverName" .)) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $out "listen" (printf "%s:7410" $any) -}}
{{- $_ := set $out "http_listen" (printf "%s:7411" $any) -}}
{{- $_ := set $out "data_listen" (printf "%s:7412" $any) -}}
{{- $_ := set $out "health_listen" (printf "%s:7413" $any) -}}
{{- $_ := set $out "arena_path" (include "kvdir.agent.arenaPath" .) -}}
{{- $_ := set $out "engine_listen" (include "kvdir.agent.address" .) -}}
{{- $_ := set $out "coordinators" (list (include "kvdir.agent.coordinators" .)) -}}
{{- if $agent.namespaces -}}
{{- $files := list -}}
{{- range $name := keys $agent.namespaces | sortAlpha -}}
{{- $files = append $files (printf "/etc/kvdir/namespaces/%s.toml" $name) -}}
{{- end -}}
{{- $_ := set $out "namespaces" $files -}}
{{- $_ := set $out "arena_bytes" (include "kvdir.bytes" $agent.arena.size | int64) -}}
{{- end -}}
{{- $_ := set $out "accept_bytes" (include "kvdir.bytes" $agent.accept.size | int64) -}}
{{- $_ := set $out "accept_namespaces" $agent.accept.namespaces -}}
{{- $_ := set $out "replica" $agent.replica.enabled -}}
{{- if $agent.replica.enabled -}}
{{- $_ := set $out "replica_path" (printf "%s/%sreplica" (include "kvdir.agent.directory" .) (include "kvdir.agent.prefix" .)) -}}
{{- $_ := set $out "replica_max_bytes" (include "kvdir.bytes" $agent.replica.size | int64) -}}
{{- end -}}
{{- $_ := set $out "transports" ($agent.rdma.enabled | ternary (list "shm" "ucx" "tcp") (list "shm" "tcp")) -}}
{{- if $agent.rdma.enabled -}}
{{- $_ := set $out "ucp_library" $agent.rdma.ucpLibrary -}}
{{- end -}}
{{- toJson $out -}}
{{- end }}

{{- define "kvdir.coordinator.toml" -}}
{{- $settings := merge (include "kvdir.coordinator.owned" . | fromJson) .Values.coordinator.config -}}
{{- with include "kvdir.coordinator.indexBytes" . -}}
{{- $settings = merge $settings (dict "max_index_bytes" (int64 .)) -}}
{{- end -}}
{{- include "kvdir.toml" $settings -}}
{{- end }}

{{- define "kvdir.agent.toml" -}}
{{- include "kvdir.toml" (merge (include "kvdir.agent.owned" . | fromJson) .Values.agent.config) -}}
{{- end }}
