{{- define "tollkeeper.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "tollkeeper.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- $name := include "tollkeeper.name" . }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tollkeeper.selector" -}}
app.kubernetes.io/name: {{ include "tollkeeper.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tollkeeper.labels" -}}
{{ include "tollkeeper.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "tollkeeper.image" -}}
{{- with .Values.image }}
{{- if .digest }}
{{- printf "%s@%s" .repository .digest }}
{{- else }}
{{- printf "%s:%s" .repository (default $.Chart.AppVersion .tag) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tollkeeper.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "tollkeeper.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "tollkeeper.rulesConfigMap" -}}
{{- default (printf "%s-rules" (include "tollkeeper.fullname" . | trunc 57)) .Values.existingConfigMap }}
{{- end }}

{{- define "tollkeeper.secret" -}}
{{- default (include "tollkeeper.fullname" .) .Values.existingSecret }}
{{- end }}

{{/* What the Secret's keys are, as JSON: our name of it to its key; those that are not used are left out. */}}
{{- define "tollkeeper.secretKeys" -}}
{{- $keys := dict }}
{{- if .Values.existingSecret }}
{{- range $name, $key := .Values.existingSecretKeys }}{{ if $key }}{{ $_ := set $keys $name $key }}{{ end }}{{ end }}
{{- else }}
{{- range $name, $value := .Values.secret }}{{ if $value }}{{ $_ := set $keys $name (kebabcase $name) }}{{ end }}{{ end }}
{{- end }}
{{- toJson $keys }}
{{- end }}

{{/* Whether counters live in Redis: by `redis.url`, or because a REDIS_ variable or BACKEND_TYPE says so. */}}
{{- define "tollkeeper.usesRedis" -}}
{{- $names := keys .Values.settings }}
{{- range .Values.extraEnv }}{{ $names = append $names .name }}{{ end }}
{{- $redis := not (empty .Values.redis.url) }}
{{- range $names }}{{ if or (hasPrefix "REDIS_" .) (eq "BACKEND_TYPE" .) }}{{ $redis = true }}{{ end }}{{ end }}
{{- if $redis }}true{{ end }}
{{- end }}

{{/* The settings of the process as JSON: what the chart needs, and over it what `settings` says. */}}
{{- define "tollkeeper.settings" -}}
{{- $secrets := include "tollkeeper.secretKeys" . | fromJson }}
{{- $all := dict
  "RUNTIME_ROOT" "/data" "RUNTIME_SUBDIRECTORY" "ratelimit" "RUNTIME_APPDIRECTORY" "config"
  "RUNTIME_WATCH_ROOT" "false" "RUNTIME_IGNOREDOTFILES" "true"
  "GRPC_PORT" (toString .Values.ports.grpc) "PORT" (toString .Values.ports.http)
  "DEBUG_HOST" .Values.debug.host "DEBUG_PORT" (toString .Values.debug.port)
  "GRPC_MAX_CONNECTION_AGE" .Values.maxConnectionAge
  "TOLLKEEPER_MEMORY_BYTES" .Values.memoryBytes
  "TOLLKEEPER_DRAIN_PERIOD" (printf "%ds" (int .Values.shutdown.drainSeconds))
  "TOLLKEEPER_SHUTDOWN_TIMEOUT" (printf "%ds" (int .Values.shutdown.timeoutSeconds)) }}
{{- if .Values.metrics.enabled }}
{{- $_ := merge $all (dict
  "USE_PROMETHEUS" "true" "PROMETHEUS_ADDR" (printf ":%d" (int .Values.metrics.port)) "PROMETHEUS_PATH" .Values.metrics.path) }}
{{- end }}
{{- with .Values.redis }}
{{- if .url }}
{{- $_ := merge $all (dict "REDIS_URL" .url "REDIS_TYPE" .type) }}
{{- end }}
{{- if .tls.enabled }}
{{- $_ := set $all "REDIS_TLS" "true" }}
{{- if .tls.existingSecret }}
{{- with .tls.caKey }}{{ $_ := set $all "REDIS_TLS_CACERT" (printf "/etc/tollkeeper/redis-tls/%s" .) }}{{ end }}
{{- with .tls.certKey }}{{ $_ := set $all "REDIS_TLS_CLIENT_CERT" (printf "/etc/tollkeeper/redis-tls/%s" .) }}{{ end }}
{{- with .tls.keyKey }}{{ $_ := set $all "REDIS_TLS_CLIENT_KEY" (printf "/etc/tollkeeper/redis-tls/%s" .) }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- range $name, $setting := dict
  "redisAuth" "TOLLKEEPER_REDIS_AUTH_FILE" "redisSentinelAuth" "TOLLKEEPER_REDIS_SENTINEL_AUTH_FILE"
  "adminToken" "TOLLKEEPER_ADMIN_TOKEN_FILE" }}
{{- if hasKey $secrets $name }}{{ $_ := set $all $setting (printf "/etc/tollkeeper/secrets/%s" (kebabcase $name)) }}{{ end }}
{{- end }}
{{- with .Values.tls }}
{{- if .enabled }}
{{- $_ := merge $all (dict
  "GRPC_SERVER_USE_TLS" "true"
  "GRPC_SERVER_TLS_CERT" (printf "/etc/tollkeeper/tls/%s" .certKey)
  "GRPC_SERVER_TLS_KEY" (printf "/etc/tollkeeper/tls/%s" .keyKey)) }}
{{- if .http }}
{{- $_ := merge $all (dict
  "TOLLKEEPER_HTTP_TLS_CERT" (printf "/etc/tollkeeper/tls/%s" .certKey)
  "TOLLKEEPER_HTTP_TLS_KEY" (printf "/etc/tollkeeper/tls/%s" .keyKey)) }}
{{- end }}
{{- with .clientCAKey }}{{ $_ := set $all "GRPC_CLIENT_TLS_CACERT" (printf "/etc/tollkeeper/tls/%s" .) }}{{ end }}
{{- with .clientSAN }}{{ $_ := set $all "GRPC_CLIENT_TLS_SAN" . }}{{ end }}
{{- end }}
{{- end }}
{{- range $name, $value := .Values.settings }}
{{- /* A number of a values file is a float, and 1000000 would be written as 1e+06. */}}
{{- if and (kindIs "float64" $value) (eq $value (floor $value)) }}{{ $value = int64 $value }}{{ end }}
{{- $_ := set $all $name (toString $value) }}
{{- end }}
{{- toJson $all }}
{{- end }}

{{/* Checks that the schema cannot express: values that contradict each other. */}}
{{- define "tollkeeper.validate" -}}
{{- $value := "replicaCount" }}{{ $replicas := int .Values.replicaCount }}
{{- if .Values.autoscaling.enabled }}
{{- $value = "autoscaling.maxReplicas" }}{{ $replicas = int .Values.autoscaling.maxReplicas }}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) }}
{{- fail "autoscaling.minReplicas is above autoscaling.maxReplicas: lower the one or raise the other" }}
{{- end }}
{{- end }}
{{- if and (gt $replicas 1) (not (include "tollkeeper.usesRedis" .)) (not .Values.allowReplicasOnMemory) }}
{{- fail (printf "%s is %d and counters live in the memory of each replica, so a limit would be %d times what the rules say: set redis.url, or %s to 1, or allowReplicasOnMemory to true if that is meant" $value $replicas $replicas $value) }}
{{- end }}
{{- if not .Values.redis.url }}
{{- if or .Values.redis.tls.enabled .Values.secret.redisAuth .Values.secret.redisSentinelAuth .Values.existingSecretKeys.redisAuth .Values.existingSecretKeys.redisSentinelAuth }}
{{- if not (include "tollkeeper.usesRedis" .) }}
{{- fail "TLS or a password for Redis is set and redis.url is not: set redis.url" }}
{{- end }}
{{- end }}
{{- end }}
{{- if .Values.existingSecret }}
{{- range $name, $text := .Values.secret }}
{{- if $text }}{{ fail (printf "secret.%s is set beside existingSecret, which goes before it: put it there and name its key in existingSecretKeys.%s" $name $name) }}{{ end }}
{{- end }}
{{- if eq "{}" (include "tollkeeper.secretKeys" .) }}
{{- fail "existingSecret is set and existingSecretKeys names none of its keys, so nothing of it is used: name them" }}
{{- end }}
{{- else }}
{{- range $name, $key := .Values.existingSecretKeys }}
{{- if $key }}{{ fail (printf "existingSecretKeys.%s is set and existingSecret is not: set existingSecret" $name) }}{{ end }}
{{- end }}
{{- end }}
{{- include "tollkeeper.validateNames" . }}
{{- if and .Values.existingConfigMap .Values.rules }}
{{- fail "rules and existingConfigMap are both set: keep one of them" }}
{{- end }}
{{- if and .Values.tls.enabled (not .Values.tls.existingSecret) }}
{{- fail "tls.enabled is true and tls.existingSecret names no Secret with the certificate: set it" }}
{{- end }}
{{- if and .Values.tls.http (not .Values.tls.enabled) }}
{{- fail "tls.http is true and tls.enabled is false: set tls.enabled" }}
{{- end }}
{{- if and (or .Values.tls.clientCAKey .Values.tls.clientSAN) (not .Values.tls.enabled) }}
{{- fail "tls.clientCAKey or tls.clientSAN is set and tls.enabled is false: certificates of clients would not be checked; set tls.enabled" }}
{{- end }}
{{- if and .Values.tls.clientSAN (not .Values.tls.clientCAKey) }}
{{- fail "tls.clientSAN is set and tls.clientCAKey is not: no certificate of a client would be asked for; set tls.clientCAKey" }}
{{- end }}
{{- if ne (empty .Values.redis.tls.certKey) (empty .Values.redis.tls.keyKey) }}
{{- fail "redis.tls.certKey and redis.tls.keyKey go together: set both or none" }}
{{- end }}
{{- if le (int .Values.shutdown.timeoutSeconds) (int .Values.shutdown.drainSeconds) }}
{{- fail "shutdown.timeoutSeconds must be longer than shutdown.drainSeconds, which it includes" }}
{{- end }}
{{- if and (not .Values.metrics.enabled) .Values.serviceMonitor.enabled }}
{{- fail "serviceMonitor.enabled is true and metrics.enabled is false: there is nothing to scrape; set metrics.enabled" }}
{{- end }}
{{- end }}

{{/* Settings that other parts of the manifests rest on have values of their own. */}}
{{- define "tollkeeper.validateNames" -}}
{{- $owned := dict
  "GRPC_PORT" "ports.grpc" "PORT" "ports.http" "DEBUG_PORT" "debug.port" "GRPC_SERVER_USE_TLS" "tls.enabled"
  "TOLLKEEPER_HTTP_TLS_CERT" "tls.http" "TOLLKEEPER_HTTP_TLS_KEY" "tls.http"
  "USE_PROMETHEUS" "metrics.enabled" "PROMETHEUS_ADDR" "metrics.port" "PROMETHEUS_PATH" "metrics.path"
  "RUNTIME_ROOT" "rules" "RUNTIME_SUBDIRECTORY" "rules" "RUNTIME_APPDIRECTORY" "rules"
  "TOLLKEEPER_DRAIN_PERIOD" "shutdown.drainSeconds" "TOLLKEEPER_SHUTDOWN_TIMEOUT" "shutdown.timeoutSeconds" }}
{{- range $name, $_ := .Values.settings }}
{{- if hasKey $owned $name }}{{ fail (printf "settings.%s: the chart sets it from the value %s: set that" $name (get $owned $name)) }}{{ end }}
{{- end }}
{{- $set := include "tollkeeper.settings" . | fromJson }}
{{- range .Values.extraEnv }}
{{- if hasKey $owned .name }}{{ fail (printf "extraEnv: the chart sets %s from the value %s: set that" .name (get $owned .name)) }}{{ end }}
{{- if hasKey $set .name }}{{ fail (printf "extraEnv: %s is set already: put it into the value settings" .name) }}{{ end }}
{{- end }}
{{- end }}
