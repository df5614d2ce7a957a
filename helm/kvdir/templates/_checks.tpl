{{/* What the schema cannot see: values that do not work together. Every fault is a sentence with its fix; all are said at once. */}}

{{- define "kvdir.check" -}}
{{- $faults := list -}}
{{- range list "kvdir.faults.tls" "kvdir.faults.coordinator" "kvdir.faults.agent" "kvdir.faults.memory" "kvdir.faults.settings" "kvdir.faults.monitoring" -}}
{{- $faults = concat $faults (include . $ | fromJsonArray) -}}
{{- end -}}
{{- if $faults -}}
{{- fail (printf "\n\nThese values cannot work:\n- %s\n" (join "\n- " $faults)) -}}
{{- end -}}
{{- end }}

{{- define "kvdir.faults.tls" -}}
{{- $out := list -}}
{{- $tls := .Values.tls -}}
{{- if and (eq $tls.mode "none") (not .Values.insecure) -}}
{{- $out = append $out "tls.mode is none, so nothing would be encrypted and nobody asked who he is: set tls.mode to secret, certManager or csi, or acknowledge it with insecure=true (docs/security.md)" -}}
{{- end -}}
{{- if eq $tls.mode "secret" -}}
{{- range $part := list "coordinator" "agent" -}}
{{- if not (get $tls.secret $part) -}}
{{- $out = append $out (printf "tls.secret.%s: name the Secret with tls.crt, tls.key and ca.crt, since tls.mode is secret" $part) -}}
{{- end -}}
{{- end -}}
{{- else if or $tls.secret.coordinator $tls.secret.agent -}}
{{- $out = append $out (printf "tls.secret is given but tls.mode is %s: set tls.mode=secret, or leave tls.secret empty" $tls.mode) -}}
{{- end -}}
{{- if has $tls.mode (list "certManager" "csi") -}}
{{- if not $tls.certManager.issuerName -}}
{{- $out = append $out "tls.certManager.issuerName: name the Issuer or ClusterIssuer that signs, since cert-manager is asked" -}}
{{- end -}}
{{- if le (include "kvdir.seconds" $tls.certManager.duration | int64) (include "kvdir.seconds" $tls.certManager.renewBefore | int64) -}}
{{- $out = append $out (printf "tls.certManager.renewBefore: %s must be less than duration, %s, or certificates are renewed without end" $tls.certManager.renewBefore $tls.certManager.duration) -}}
{{- end -}}
{{- end -}}
{{- if or .Values.policy.toml .Values.policy.secretName -}}
{{- if eq $tls.mode "none" -}}
{{- $out = append $out "policy needs TLS, whose certificates say who calls: set tls.mode, or leave policy empty" -}}
{{- end -}}
{{- if and .Values.policy.toml .Values.policy.secretName -}}
{{- $out = append $out "policy.toml and policy.secretName: give one of them" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.coordinator.indexer.enabled (not .Values.insecure) (ne $tls.mode "none") -}}
{{- $out = append $out "coordinator.indexer.enabled: this API is plain HTTP without identities; acknowledge that with insecure=true, or leave it off" -}}
{{- end -}}
{{- toJson $out -}}
{{- end }}

{{- define "kvdir.faults.coordinator" -}}
{{- $out := list -}}
{{- $c := .Values.coordinator -}}
{{- if and (eq $c.store.type "redis") (not $c.store.secretName) -}}
{{- $out = append $out "coordinator.store.secretName: name the Secret that holds the store's URL, since coordinator.store.type is redis" -}}
{{- end -}}
{{- if and (eq $c.store.type "memory") $c.store.secretName -}}
{{- $out = append $out "coordinator.store.secretName is given but coordinator.store.type is memory: set it to redis, or leave the Secret out" -}}
{{- end -}}
{{- if eq $c.store.type "redis" -}}
{{- if $c.checkpoint.enabled -}}
{{- $out = append $out "coordinator.checkpoint: a directory in Redis is kept there: leave the checkpoint off, or use coordinator.store.type=memory" -}}
{{- end -}}
{{- if $c.lookupWorkers -}}
{{- $out = append $out "coordinator.lookupWorkers: they read an index in memory, which coordinators on Redis do not have: set it to 0 and add replicas instead" -}}
{{- end -}}
{{- end -}}
{{- if and $c.pdb.enabled (lt (int $c.replicas) 2) -}}
{{- $out = append $out (printf "coordinator.pdb.enabled: with %d replica it would block every drain of its node: use 2 replicas or more, or leave it off" (int $c.replicas)) -}}
{{- end -}}
{{- if and (include "kvdir.coordinator.pdb" .) (ge (int $c.pdb.maxUnavailable) (int $c.replicas)) -}}
{{- $out = append $out (printf "coordinator.pdb.maxUnavailable: %d of %d replicas protects nothing: make it smaller than coordinator.replicas" (int $c.pdb.maxUnavailable) (int $c.replicas)) -}}
{{- end -}}
{{- $least := include "kvdir.coordinator.graceSeconds" . | int -}}
{{- if and $c.terminationGracePeriodSeconds (lt (int $c.terminationGracePeriodSeconds) $least) -}}
{{- $out = append $out (printf "coordinator.terminationGracePeriodSeconds: %d is too short: preStopSeconds, grace_s and 5 s to end are %d; 0 takes that" (int $c.terminationGracePeriodSeconds) $least) -}}
{{- end -}}
{{- toJson $out -}}
{{- end }}

{{- define "kvdir.faults.agent" -}}
{{- $out := list -}}
{{- $a := .Values.agent -}}
{{- if and (not $a.namespaces) (eq (include "kvdir.bytes" $a.accept.size) "0") -}}
{{- $out = append $out "agent: it would serve nothing: give agent.namespaces, or agent.accept.size for the namespaces that engines bring along" -}}
{{- end -}}
{{- if and $a.rdma.enabled (not $a.rdma.resource) -}}
{{- $out = append $out "agent.rdma.resource: name what the device plugin offers, such as rdma/ib, since agent.rdma.enabled is true (kubectl describe node lists it)" -}}
{{- end -}}
{{- if and (not $a.rdma.enabled) (or $a.rdma.resource $a.rdma.env $a.rdma.ucpLibrary) -}}
{{- $out = append $out "agent.rdma has settings but agent.rdma.enabled is false: set it to true, or leave them out" -}}
{{- end -}}
{{- if and (not $a.rdma.enabled) (eq (int $a.runAsUser) 0) -}}
{{- $out = append $out "agent.runAsUser: an agent needs no root but to lock memory for RDMA: give the engine's user, or set agent.rdma.enabled" -}}
{{- end -}}
{{- if eq $a.mode "daemonset" -}}
{{- if $a.arena.hugePages -}}
{{- $out = append $out "agent.arena.hugePages: engines in other pods could not map a volume of the agent's pod: use agent.mode=sidecar, or huge pages of the kernel (agent.config.huge_pages)" -}}
{{- end -}}
{{- if $a.discovery.serviceAccounts -}}
{{- $out = append $out "agent.discovery.serviceAccounts: they are of engines' pods with a sidecar; the DaemonSet has its own: leave the list empty" -}}
{{- end -}}
{{- $least := include "kvdir.agent.graceSeconds" . | int -}}
{{- $socket := include "kvdir.agent.address" . | trimPrefix "unix:" -}}
{{- if gt (len $socket) 107 -}}
{{- $out = append $out (printf "agent.daemonset.hostPath: the socket's path, %s, has more than the 107 characters that a system takes: choose a shorter directory, release name or namespace" $socket) -}}
{{- end -}}
{{- if and $a.daemonset.terminationGracePeriodSeconds (lt (int $a.daemonset.terminationGracePeriodSeconds) $least) -}}
{{- $out = append $out (printf "agent.daemonset.terminationGracePeriodSeconds: %d is too short: grace_s and 5 s to end are %d; 0 takes that" (int $a.daemonset.terminationGracePeriodSeconds) $least) -}}
{{- end -}}
{{- else if and (eq $a.discovery.mode "kubernetes") (not $a.discovery.serviceAccounts) -}}
{{- $out = append $out "agent.discovery.serviceAccounts: name those of the engines' pods, which must be allowed to read EndpointSlices, or use agent.discovery.mode=dns" -}}
{{- end -}}
{{- if and (eq $a.discovery.mode "dns") $a.discovery.serviceAccounts -}}
{{- $out = append $out "agent.discovery.serviceAccounts: nobody needs rights with agent.discovery.mode=dns: set it to kubernetes, or leave the list empty" -}}
{{- end -}}
{{- range $item := $a.rdma.env -}}
{{- if hasPrefix "PEER_AGENT_" $item.name -}}
{{- $out = append $out (printf "agent.rdma.env: %s is a setting of the agent: give it in agent.config" $item.name) -}}
{{- end -}}
{{- end -}}
{{- toJson $out -}}
{{- end }}

{{- define "kvdir.faults.memory" -}}
{{- $out := list -}}
{{- $a := .Values.agent -}}
{{- $need := include "kvdir.agent.memoryBytes" . | int64 -}}
{{- with (default dict $a.resources.limits).memory -}}
{{- if lt (include "kvdir.bytes" . | int64) $need -}}
{{- $out = append $out (printf "agent.resources.limits.memory: %s is less than arena, replica and agent.heap together, %s, and the kernel would kill the agent: raise it, leave it out (it is computed), or make them smaller" (toString .) (include "kvdir.mebibytes" $need)) -}}
{{- end -}}
{{- end -}}
{{- if lt (include "kvdir.bytes" $a.heap | int64) 268435456 -}}
{{- $out = append $out (printf "agent.heap: %s is too small: an agent needs 256Mi for itself" $a.heap) -}}
{{- end -}}
{{- range $part := list "agent" "coordinator" -}}
{{- $resources := (get $.Values $part).resources -}}
{{- $request := (default dict $resources.requests).memory -}}
{{- $limit := (default dict $resources.limits).memory -}}
{{- if and $request $limit -}}
{{- if gt (include "kvdir.bytes" $request | int64) (include "kvdir.bytes" $limit | int64) -}}
{{- $out = append $out (printf "%s.resources: the memory request, %s, is above the limit, %s: lower the one or raise the other" $part (toString $request) (toString $limit)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $c := .Values.coordinator -}}
{{- with (default dict $c.resources.limits).memory -}}
{{- $limit := include "kvdir.bytes" . | int64 -}}
{{- if $c.lookupWorkers -}}
{{- if lt $limit (add (include "kvdir.bytes" $c.lookupShm | int64) 268435456) -}}
{{- $out = append $out (printf "coordinator.resources.limits.memory: %s does not hold coordinator.lookupShm, %s, and 256Mi: raise it, or lower lookupShm" (toString .) $c.lookupShm) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $c.config.max_index_bytes -}}
{{- $shared := gt (int $c.lookupWorkers) 0 -}}
{{- $name := $shared | ternary "coordinator.lookupShm" "coordinator.resources.limits.memory" -}}
{{- $room := $shared | ternary $c.lookupShm (default dict $c.resources.limits).memory -}}
{{- $text := kindIs "float64" . | ternary . (toString . | replace "B" "" | replace " " "") -}}
{{- if $room -}}
{{- if gt (include "kvdir.bytes" $text | int64) (include "kvdir.bytes" $room | int64) -}}
{{- $out = append $out (printf "coordinator.config.max_index_bytes: %s is above %s, %s: raise that, or lower the bound" (toString .) $name (toString $room)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $out -}}
{{- end }}

{{- define "kvdir.faults.settings" -}}
{{- $out := list -}}
{{- $owners := dict "name" "the pod's name" "store" "coordinator.store" -}}
{{- $_ := set $owners "page_listen" "coordinator.page" -}}
{{- $_ := set $owners "indexer_listen" "coordinator.indexer" -}}
{{- $_ := set $owners "lookup_workers" "coordinator.lookupWorkers" -}}
{{- $_ := set $owners "checkpoint" "coordinator.checkpoint" -}}
{{- $coordinator := append (include "kvdir.coordinator.owned" . | fromJson | keys) "name" -}}
{{- $coordinator = concat $coordinator (list "store" "tls_cert" "tls_key" "tls_ca" "tls_server_name" "policy") | uniq -}}
{{- range $key := keys .Values.coordinator.config | sortAlpha -}}
{{- if has $key $coordinator -}}
{{- $out = append $out (printf "coordinator.config.%s: the chart sets it; use %s" $key (get $owners $key | default (include "kvdir.owner" $key))) -}}
{{- end -}}
{{- end -}}
{{- $agent := concat (include "kvdir.agent.owned" . | fromJson | keys) (list "node" "advertise" "namespaces" "arena_bytes" "replica_path" "replica_max_bytes" "ucp_library" "tls_cert" "tls_key" "tls_ca" "tls_server_name" "tls_peer_name" "data_tls_cert" "data_tls_key" "data_tls_ca" "policy") | uniq -}}
{{- range $key := keys .Values.agent.config | sortAlpha -}}
{{- if has $key $agent -}}
{{- $out = append $out (printf "agent.config.%s: the chart sets it; use %s" $key (include "kvdir.owner" $key)) -}}
{{- end -}}
{{- end -}}
{{- range $path, $labels := dict "coordinator.podLabels" .Values.coordinator.podLabels "agent.daemonset.podLabels" .Values.agent.daemonset.podLabels "commonLabels" .Values.commonLabels -}}
{{- range $key := keys $labels | sortAlpha -}}
{{- if or (hasPrefix "app.kubernetes.io/" $key) (hasPrefix "kvdir/" $key) (eq $key "helm.sh/chart") -}}
{{- $out = append $out (printf "%s: %s is a label that selectors of the chart go by: choose another name" $path $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $out -}}
{{- end }}

{{/* Which value gives a setting that the chart writes itself. */}}
{{- define "kvdir.owner" -}}
{{- if hasPrefix "tls_" . -}}tls
{{- else if hasPrefix "data_tls" . -}}tls, which covers the data plane
{{- else if eq . "policy" -}}policy
{{- else if eq . "insecure" -}}insecure
{{- else if hasPrefix "accept" . -}}agent.accept
{{- else if hasPrefix "replica" . -}}agent.replica
{{- else if hasPrefix "arena" . -}}agent.arena
{{- else if eq . "namespaces" -}}agent.namespaces
{{- else if eq . "coordinators" -}}agent.discovery
{{- else if or (eq . "transports") (eq . "ucp_library") -}}agent.rdma
{{- else -}}its ports and names as they are: objects of the chart refer to them
{{- end -}}
{{- end }}

{{- define "kvdir.faults.monitoring" -}}
{{- $out := list -}}
{{- $m := .Values.monitoring -}}
{{- if gt (include "kvdir.seconds" $m.scrapeTimeout | int64) (include "kvdir.seconds" $m.interval | int64) -}}
{{- $out = append $out (printf "monitoring.scrapeTimeout: %s is above monitoring.interval, %s, which Prometheus refuses: lower it" $m.scrapeTimeout $m.interval) -}}
{{- end -}}
{{- if and $m.dashboards (not $m.dashboardLabels) -}}
{{- $out = append $out "monitoring.dashboardLabels: Grafana's sidecar finds ConfigMaps by a label: give the one it looks for" -}}
{{- end -}}
{{- toJson $out -}}
{{- end }}
