{{- define "warmroute.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "warmroute.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "warmroute.labels" -}}
{{ include "warmroute.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "warmroute.account" -}}
{{- default (include "warmroute.fullname" .) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "warmroute.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{- define "warmroute.engineNamespace" -}}
{{- default .Release.Namespace .Values.engines.namespace -}}
{{- end -}}

{{- define "warmroute.stateSecret" -}}
{{- default (printf "%s-state" (include "warmroute.fullname" .)) .Values.state.existingSecret -}}
{{- end -}}

{{- define "warmroute.stateUrl" -}}
{{- if .Values.state.url -}}
{{- .Values.state.url -}}
{{- else if .Values.valkey.enabled -}}
{{- printf "redis://%s-valkey:6379" (include "warmroute.fullname" .) -}}
{{- else -}}
{{- fail "set state.url or state.existingSecret, or valkey.enabled: routers and sidecars meet there" -}}
{{- end -}}
{{- end -}}

{{- define "warmroute.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- if .Values.engines.service -}}
{{- $source := dict "service" .Values.engines.service "port" .Values.engines.port "namespace" (include "warmroute.engineNamespace" .) -}}
{{- $config = mergeOverwrite (dict "discovery" (dict "kubernetes" $source)) $config -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{- define "warmroute.clientPort" -}}
{{- splitList ":" .Values.config.listen | last -}}
{{- end -}}

{{- define "warmroute.adminPort" -}}
{{- splitList ":" .Values.config.admin | last -}}
{{- end -}}

{{- define "warmroute.hardened" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
