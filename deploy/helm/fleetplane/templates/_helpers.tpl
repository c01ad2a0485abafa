{{- define "fleetplane.name" -}}
{{- $name := ternary .Release.Name (printf "%s-fleetplane" .Release.Name) (contains "fleetplane" .Release.Name) -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "fleetplane.labels" -}}
app.kubernetes.io/name: fleetplane
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "fleetplane.selects" -}}
app.kubernetes.io/name: fleetplane
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "fleetplane.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote -}}
{{- end -}}

{{- /* How a listener is spelled in the environment. */ -}}
{{- define "fleetplane.variable" -}}
{{- printf "FLEETPLANE_LISTENERS__%s" (. | upper | replace "-" "_") -}}
{{- end -}}
