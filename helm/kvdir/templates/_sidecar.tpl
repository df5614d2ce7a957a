{{/* For charts that have this one as a dependency: the agent as a native sidecar of an engine's pod. See examples/vllm.
   Call each with the context of this chart: index .Subcharts "kvdir". */}}

{{/* An item of initContainers. The engine's container starts when the agent's startup probe passes, and stops before it. */}}
{{- define "kvdir.sidecar.container" -}}
- restartPolicy: Always
  {{- include "kvdir.agent.container" . | nindent 2 }}
{{- end }}

{{/* Items of volumes. Only the agent's container mounts the files with keys, so all may read them. The pod needs
   no fsGroup, but with agent.arena.hugePages: the kubelet mounts hugetlbfs as root's alone. */}}
{{- define "kvdir.sidecar.volumes" -}}
{{ include "kvdir.agent.volumes" (list . "0444") }}
{{- end }}

{{/* Items of the engine's volumeMounts. */}}
{{- define "kvdir.sidecar.engineMounts" -}}
{{ include "kvdir.engine.mounts" . }}
{{- end }}

{{/* Labels of the pod. */}}
{{- define "kvdir.sidecar.labels" -}}
{{ include "kvdir.agent.mark" . }}
{{- end }}

{{/* Annotations of the pod: settings are read at start, so the pod follows them. */}}
{{- define "kvdir.sidecar.annotations" -}}
kvdir/agent-config: {{ include "kvdir.agent.configSum" . }}
{{- end }}

{{/* Where the engine attaches, for its connector's settings. */}}
{{- define "kvdir.sidecar.address" -}}
{{ include "kvdir.agent.address" . }}
{{- end }}
