{{- define "vllm.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end -}}
{{- end }}

{{- define "vllm.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* Numbers of a file are floats, and whole ones from a million on would be written with an exponent. */}}
{{- define "vllm.argument" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end }}

{{- /* The flags of one worker. */}}
{{- define "vllm.flags" -}}
--model {{ .model.path }}
{{- with .tensorParallelSize }} --tensor-parallel-size {{ . }}{{ end }}
{{- if ne (toString .enforceEager) "false" }} --enforce-eager{{ end }}
{{- with .maxModelLen }} --max-model-len {{ include "vllm.argument" . }}{{ end }}
{{- with .gpuMemoryUtilization }} --gpu-memory-utilization {{ . }}{{ end }}
{{- if eq (toString .workerType) "prefill" }} --is-prefill-worker{{ end }} --connector {{ .connector | default "null" }}
{{- range .extraArgs }} {{ include "vllm.argument" . }}{{ end }}
{{- end }}

{{- /* Pods read the ConfigMap when they start. The router's mode stands in the frontend's command as well. */}}
{{- define "vllm.podMetadata" -}}
annotations:
  checksum/config: {{ .Values.logLevel | toString | sha256sum }}
{{- end }}
