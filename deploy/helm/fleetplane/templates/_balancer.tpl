{{- /* TLS is the servers' own, from end to end. A check decides where bytes go, which a stranger could not read. */ -}}
{{- define "fleetplane.balancer" -}}
{{- $name := include "fleetplane.name" . -}}
{{- $replicas := int .Values.replicas -}}
{{- $namespace := .Release.Namespace -}}
{{- $domain := .Values.clusterDomain -}}
global
  fd-hard-limit 100000
defaults
  mode tcp
  timeout connect 2s
  timeout client 1h
  timeout server 1h
  option httpchk
  http-check send meth GET uri /readyz ver HTTP/1.1 hdr Host fleetplane
  default-server check check-ssl verify none port 8080 inter 500ms fall 1 rise 1 on-marked-down shutdown-sessions resolvers cluster init-addr none
resolvers cluster
  parse-resolv-conf
  hold valid 5s
{{- range $listener, $port := merge (dict "web" 8080) .Values.listeners }}
frontend {{ $listener }}
  bind :{{ $port }}
  default_backend {{ $listener }}
backend {{ $listener }}
{{- if ne $listener "web" }}
  balance leastconn
  http-check send meth GET uri /readyz/reads ver HTTP/1.1 hdr Host fleetplane
{{- end }}
{{- range $number := until $replicas }}
  server s{{ $number }} {{ $name }}-{{ $number }}.{{ $name }}-servers.{{ $namespace }}.svc.{{ $domain }}:{{ $port }}
{{- end }}
{{- end }}
{{ end -}}
