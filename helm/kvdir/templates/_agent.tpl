{{/* The agent's container and volumes, the same for the sidecar and the DaemonSet. */}}

{{- define "kvdir.agent.directory" -}}
{{ eq .Values.agent.mode "sidecar" | ternary "/run/kvdir" .Values.agent.daemonset.hostPath }}
{{- end }}

{{/* Of file names: the node's directory is shared with other releases, the pod's is not. */}}
{{- define "kvdir.agent.prefix" -}}
{{ eq .Values.agent.mode "sidecar" | ternary "" (printf "%s-%s." .Release.Namespace (include "kvdir.fullname" .)) }}
{{- end }}

{{- define "kvdir.agent.arenaPath" -}}
{{- if .Values.agent.arena.hugePages -}}
/run/kvdir-huge/arena
{{- else -}}
{{ include "kvdir.agent.directory" . }}/{{ include "kvdir.agent.prefix" . }}arena
{{- end -}}
{{- end }}

{{/* Where engines attach. */}}
{{- define "kvdir.agent.address" -}}
unix:{{ include "kvdir.agent.directory" . }}/{{ include "kvdir.agent.prefix" . }}agent.sock
{{- end }}

{{- define "kvdir.agent.coordinators" -}}
{{- $namespace := .Release.Namespace -}}
{{- if eq .Values.agent.discovery.mode "kubernetes" -}}
k8s:///{{ include "kvdir.coordinator.headless" . }}.{{ $namespace }}:7400
{{- else -}}
dns:///{{ include "kvdir.coordinator.headless" . }}.{{ $namespace }}.svc.{{ .Values.clusterDomain }}:7400
{{- end -}}
{{- end }}

{{- define "kvdir.agent.arenaBytes" -}}
{{- $agent := .Values.agent -}}
{{- $files := empty $agent.namespaces | ternary "0" (include "kvdir.bytes" $agent.arena.size) -}}
{{- add $files (mul (include "kvdir.bytes" $agent.accept.size | int64) (int64 $agent.accept.namespaces)) -}}
{{- end }}

{{- define "kvdir.agent.replicaBytes" -}}
{{ .Values.agent.replica.enabled | ternary (include "kvdir.bytes" .Values.agent.replica.size) "0" }}
{{- end }}

{{/* Of the memory volume. 16 MiB beside what is counted: superblocks and pages that are not full. */}}
{{- define "kvdir.agent.volumeBytes" -}}
{{- $arena := empty .Values.agent.arena.hugePages | ternary (include "kvdir.agent.arenaBytes" .) "0" -}}
{{- add $arena (include "kvdir.agent.replicaBytes" .) 16777216 -}}
{{- end }}

{{/* Pages of the arena's own size, and two for superblock and rounding. */}}
{{- define "kvdir.agent.hugeBytes" -}}
{{- $page := include "kvdir.bytes" .Values.agent.arena.hugePages | int64 -}}
{{- mul (add (div (add (include "kvdir.agent.arenaBytes" . | int64) $page -1) $page) 2) $page -}}
{{- end }}

{{- define "kvdir.agent.memoryBytes" -}}
{{- add (include "kvdir.agent.volumeBytes" .) (include "kvdir.bytes" .Values.agent.heap) -}}
{{- end }}

{{- define "kvdir.agent.startupPeriods" -}}
{{- $seconds := .Values.agent.startupSeconds | default (add 60 (div (include "kvdir.agent.arenaBytes" . | int64) 1073741824)) -}}
{{- div (add $seconds 1) 2 -}}
{{- end }}

{{- define "kvdir.agent.resources" -}}
{{- $memory := include "kvdir.mebibytes" (include "kvdir.agent.memoryBytes" .) -}}
{{- $requests := default dict .Values.agent.resources.requests -}}
{{- $limits := merge (dict) (default dict .Values.agent.resources.limits) -}}
{{- if not $limits.memory }}{{ $_ := set $limits "memory" $memory }}{{ end -}}
{{- $requests = merge (dict) $requests (dict "memory" $limits.memory) -}}
{{- if .Values.agent.arena.hugePages -}}
{{- $name := printf "hugepages-%s" .Values.agent.arena.hugePages -}}
{{- $pages := include "kvdir.mebibytes" (include "kvdir.agent.hugeBytes" .) -}}
{{- $_ := set $limits $name $pages -}}
{{- $_ := set $requests $name $pages -}}
{{- end -}}
{{- if .Values.agent.rdma.enabled -}}
{{- $_ := set $limits .Values.agent.rdma.resource (toString .Values.agent.rdma.count) -}}
{{- $_ := set $requests .Values.agent.rdma.resource (toString .Values.agent.rdma.count) -}}
{{- end -}}
requests:
  {{- toYaml $requests | nindent 2 }}
limits:
  {{- toYaml $limits | nindent 2 }}
{{- end }}

{{- define "kvdir.agent.mounts" -}}
- {name: kvdir-agent-config, mountPath: /etc/kvdir/agent, readOnly: true}
- {name: kvdir-agent-tmp, mountPath: /tmp}
{{- include "kvdir.engine.mounts" . | nindent 0 }}
{{- if .Values.agent.namespaces }}
- {name: kvdir-agent-namespaces, mountPath: /etc/kvdir/namespaces, readOnly: true}
{{- end }}
{{- if ne .Values.tls.mode "none" }}
- {name: kvdir-agent-tls, mountPath: /etc/kvdir/tls, readOnly: true}
{{- end }}
{{- if or .Values.policy.toml .Values.policy.secretName }}
- {name: kvdir-agent-policy, mountPath: /etc/kvdir/policy, readOnly: true}
{{- end }}
{{- if eq .Values.agent.discovery.mode "kubernetes" }}
- {name: kvdir-agent-token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- end }}
{{- end }}

{{/* What an engine's container needs to map the arena: the same paths as the agent's. */}}
{{- define "kvdir.engine.mounts" -}}
- {name: kvdir-memory, mountPath: {{ include "kvdir.agent.directory" . }}}
{{- if .Values.agent.arena.hugePages }}
- {name: kvdir-huge-memory, mountPath: /run/kvdir-huge}
{{- end }}
{{- end }}

{{- define "kvdir.engine.volumes" -}}
{{- if eq .Values.agent.mode "sidecar" }}
- name: kvdir-memory
  emptyDir: {medium: Memory, sizeLimit: {{ include "kvdir.mebibytes" (include "kvdir.agent.volumeBytes" .) }}}
{{- else }}
- name: kvdir-memory
  hostPath: {path: {{ .Values.agent.daemonset.hostPath }}, type: Directory}
{{- end }}
{{- with .Values.agent.arena.hugePages }}
- name: kvdir-huge-memory
  emptyDir: {medium: HugePages-{{ . }}}
{{- end }}
{{- end }}

{{/* Call with (list . mode of files with keys). */}}
{{- define "kvdir.agent.volumes" -}}
{{- $ := index . 0 -}}
- name: kvdir-agent-config
  configMap: {name: {{ include "kvdir.agent.name" $ }}, items: [{key: agent.toml, path: agent.toml}]}
- name: kvdir-agent-tmp
  emptyDir: {sizeLimit: 64Mi}
{{- include "kvdir.engine.volumes" $ | nindent 0 }}
{{- if $.Values.agent.namespaces }}
- name: kvdir-agent-namespaces
  configMap:
    name: {{ include "kvdir.agent.name" $ }}
    items:
      {{- range $name := keys $.Values.agent.namespaces | sortAlpha }}
      - {key: namespace.{{ $name }}.toml, path: {{ $name }}.toml}
      {{- end }}
{{- end }}
{{- include "kvdir.tls.volume" (list $ "agent" "kvdir-agent-tls" (index . 1)) | nindent 0 }}
{{- include "kvdir.policy.volume" (list $ "kvdir-agent-policy" (index . 1)) | nindent 0 }}
{{- if eq $.Values.agent.discovery.mode "kubernetes" }}
- name: kvdir-agent-token
  projected:
    defaultMode: {{ index . 1 }}
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3600}
      - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- end }}

{{- define "kvdir.agent.container" -}}
name: kvdir-agent
image: {{ default (include "kvdir.image" .) .Values.agent.image | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [peer-agent]
args: [serve, --config, /etc/kvdir/agent/agent.toml]
env:
  - {name: POD_UID, valueFrom: {fieldRef: {fieldPath: metadata.uid}}}
  - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
  - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
  - {name: PEER_AGENT_NODE, value: $(POD_NAME).$(POD_UID)}
  - {name: PEER_AGENT_ADVERTISE, value: {{ eq .Values.ipFamily "IPv6" | ternary "'[$(POD_IP)]:7410'" "$(POD_IP):7410" }}}
  {{- include "kvdir.tls.env" . | nindent 2 }}
  {{- if .Values.agent.rdma.enabled }}
  {{- with .Values.agent.rdma.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- end }}
ports:
  - {name: kvdir-grpc, containerPort: 7410}
  - {name: kvdir-metrics, containerPort: 7411}
  - {name: kvdir-data, containerPort: 7412}
  - {name: kvdir-health, containerPort: 7413}
{{ include "kvdir.probes" (dict "port" 7413 "startupPeriods" (include "kvdir.agent.startupPeriods" .)) }}
resources:
  {{- include "kvdir.agent.resources" . | nindent 2 }}
securityContext:
  runAsUser: {{ int64 .Values.agent.runAsUser }}
  runAsGroup: {{ int64 .Values.agent.runAsUser }}
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: {{ ne (int .Values.agent.runAsUser) 0 }}
  capabilities:
    drop: [ALL]
    {{- if .Values.agent.rdma.enabled }}
    add: [IPC_LOCK]
    {{- end }}
  seccompProfile: {type: RuntimeDefault}
volumeMounts:
  {{- include "kvdir.agent.mounts" . | nindent 2 }}
{{- end }}
