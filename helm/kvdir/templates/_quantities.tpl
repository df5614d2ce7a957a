{{/* Arithmetic on Kubernetes quantities and durations. */}}

{{/* Bytes of "8Gi", "1.5G" or a number, as digits. */}}
{{- define "kvdir.bytes" -}}
{{- $text := kindIs "float64" . | ternary (printf "%.0f" (float64 (default 0 .))) (toString .) -}}
{{- $digits := regexFind "^[0-9]+(\\.[0-9]+)?" $text -}}
{{- $units := dict "" 1 "k" 1000 "K" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := trimPrefix $digits $text -}}
{{- if or (not $digits) (not (hasKey $units $unit)) -}}
{{- fail (printf "%q is not a quantity of bytes: write 512Mi, 4Gi or a number" $text) -}}
{{- end -}}
{{- int64 (mulf $digits (get $units $unit)) -}}
{{- end }}

{{/* Mebibytes for people and for limits, rounded up. */}}
{{- define "kvdir.mebibytes" -}}
{{ div (add (int64 .) 1048575) 1048576 }}Mi
{{- end }}

{{/* Seconds of "24h", "90m", "1h30m" or "15s". */}}
{{- define "kvdir.seconds" -}}
{{- $total := 0 -}}
{{- range regexFindAll "[0-9]+[hms]" . -1 -}}
{{- $factor := get (dict "h" 3600 "m" 60 "s" 1) (regexFind "[hms]" .) -}}
{{- $total = add $total (mul (int64 (regexFind "[0-9]+" .)) $factor) -}}
{{- end -}}
{{- $total -}}
{{- end }}

{{/* Whether to make an object of the Prometheus operator. Call with (list . wish): true, false, or null for what the cluster knows. */}}
{{- define "kvdir.wants" -}}
{{- $ := index . 0 -}}
{{- $wish := index . 1 -}}
{{- if kindIs "invalid" $wish -}}
{{- if $.Capabilities.APIVersions.Has "monitoring.coreos.com/v1" -}}yes{{- end -}}
{{- else if $wish -}}yes{{- end -}}
{{- end }}
