{{- define "platform.labels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "platform.operator" -}}
{{ printf "%s-dynamo-operator" .Release.Name | trunc 44 | trimSuffix "-" }}
{{- end }}

{{- /* A StatefulSet whose name is longer than 52 characters gets no pods. */}}
{{- define "platform.shortRelease" -}}
{{ .Release.Name | trunc 47 | trimSuffix "-" }}
{{- end }}

{{- /* Definitions and webhooks belong to the whole cluster: an operator of one namespace has none. */}}
{{- define "platform.hasWebhooks" -}}
{{- $operator := index .Values "dynamo-operator" -}}
{{- if and $operator.enabled $operator.webhook.enabled (not (include "platform.restrictedNamespace" .)) }}yes{{ end -}}
{{- end }}

{{- define "platform.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "platform.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "platform.natsAddr" -}}
{{- $given := (index .Values "dynamo-operator").natsAddr -}}
{{- if $given }}{{ $given }}{{ else if .Values.nats.enabled }}nats://{{ include "platform.shortRelease" . }}-nats.{{ .Release.Namespace }}:4222{{ end -}}
{{- end }}

{{- define "platform.etcdAddr" -}}
{{- $given := (index .Values "dynamo-operator").etcdAddr -}}
{{- if $given }}{{ $given }}{{ else if .Values.etcd.enabled }}{{ include "platform.shortRelease" . }}-etcd.{{ .Release.Namespace }}:2379{{ end -}}
{{- end }}

{{- define "platform.restrictedNamespace" -}}
{{- $restriction := (index .Values "dynamo-operator").namespaceRestriction -}}
{{- if $restriction.enabled }}{{ $restriction.targetNamespace | default .Release.Namespace }}{{ end -}}
{{- end }}
