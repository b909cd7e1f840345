{{/* Checks that the schema cannot express: values that contradict each other, and secrets. */}}
{{- define "tollkeeper.validate" -}}
{{- if not .Values.enabled }}
{{- fail "enabled is false and the chart is rendered: give it `condition: tollkeeper.enabled` in the dependencies of the parent chart" }}
{{- end }}
{{- if not (regexMatch "^[a-z]" (include "tollkeeper.fullname" .)) }}
{{- fail (printf "%s is no name of a Service, which must begin with a letter: set fullnameOverride" (include "tollkeeper.fullname" .)) }}
{{- end }}
{{- include "tollkeeper.validateReplicas" . }}
{{- include "tollkeeper.validateSecrets" . }}
{{- include "tollkeeper.validateNames" . }}
{{- include "tollkeeper.validateTls" . }}
{{- include "tollkeeper.validateRegions" . }}
{{- include "tollkeeper.validateMemory" . }}
{{- if and .Values.rulesVolume (or .Values.rules .Values.existingConfigMaps) }}
{{- fail "rulesVolume is set beside rules or existingConfigMaps, which it replaces: keep one source" }}
{{- end }}
{{- if le (int .Values.shutdown.timeoutSeconds) (int .Values.shutdown.drainSeconds) }}
{{- fail "shutdown.timeoutSeconds must be longer than shutdown.drainSeconds, which it includes" }}
{{- end }}
{{- if and (not .Values.metrics.enabled) .Values.serviceMonitor.enabled }}
{{- fail "serviceMonitor.enabled is true and metrics.enabled is false: there is nothing to scrape; set metrics.enabled" }}
{{- end }}
{{- end }}

{{- define "tollkeeper.validateReplicas" -}}
{{- $value := "replicaCount" }}{{ $replicas := int .Values.replicaCount }}
{{- if .Values.autoscaling.enabled }}
{{- $value = "autoscaling.maxReplicas" }}{{ $replicas = int .Values.autoscaling.maxReplicas }}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) }}
{{- fail "autoscaling.minReplicas is above autoscaling.maxReplicas: lower the one or raise the other" }}
{{- end }}
{{- end }}
{{- if and (gt $replicas 1) (not (include "tollkeeper.sharesCounters" .)) (not .Values.allowReplicasOnMemory) }}
{{- fail (printf "%s is %d and counters are in the memory of each replica, so a limit would be %d times what the rules say: set redis.url, or %s to 1, or allowReplicasOnMemory to true if that is meant" $value $replicas $replicas $value) }}
{{- end }}
{{- end }}

{{/*
Values are stored by Helm and printed by `helm get values`, and the environment is in the manifest: secrets belong into a
Secret. Messages never repeat a value.
*/}}
{{- define "tollkeeper.validateSecrets" -}}
{{- $fix := "create a Secret (kubectl create secret generic NAME --from-literal=KEY=...), set existingSecret=NAME and existingSecretKeys" }}
{{- $auth := include "tollkeeper.secretInUrl" .Values.redis.url }}
{{- if $auth }}
{{- fail (printf "redis.url holds a user or password, which Helm would store and print: %s.redisAuth=KEY, and remove both from redis.url" $fix) }}
{{- end }}
{{- if include "tollkeeper.secretInUrl" .Values.regions.globalRedis.url }}
{{- fail (printf "regions.globalRedis.url holds a user or password, which Helm would store and print: %s.globalRedisAuth=KEY, and remove both from the URL" $fix) }}
{{- end }}
{{- $variables := dict }}
{{- range $name, $value := .Values.settings }}{{ $_ := set $variables $name (dict "place" (printf "settings.%s" $name) "value" (toString $value)) }}{{ end }}
{{- range .Values.extraEnv }}{{ if hasKey . "value" }}{{ $_ := set $variables .name (dict "place" (printf "extraEnv: the value of %s" .name) "value" (toString .value)) }}{{ end }}{{ end }}
{{- range $name, $it := $variables }}
{{- if $it.value }}
{{- $key := get (dict
  "REDIS_AUTH" "redisAuth" "REDIS_URL" "redisAuth" "REDIS_SENTINEL_AUTH" "redisSentinelAuth"
  "REDIS_PERSECOND_AUTH" "redisPerSecondAuth" "REDIS_PERSECOND_URL" "redisPerSecondAuth"
  "REDIS_PERSECOND_SENTINEL_AUTH" "redisPerSecondSentinelAuth" "TOLLKEEPER_ADMIN_TOKEN" "adminToken"
  "TOLLKEEPER_GLOBAL_REDIS_URL" "globalRedisAuth") $name }}
{{- $remedy := ternary (printf "%s.%s=KEY" $fix $key) (printf "set %s by extraEnv with valueFrom.secretKeyRef" $name) (not (empty $key)) }}
{{- if regexMatch "_(AUTH|TOKEN|PASSWORD|SECRET|HEADERS|HASH_KEY|ACCESS_KEY|ACCESS_KEY_ID|CREDENTIALS_FULL_URI|CREDENTIALS_RELATIVE_URI)$" $name }}
{{- fail (printf "%s is a secret, which Helm would store and print: %s" $it.place $remedy) }}
{{- end }}
{{- if include "tollkeeper.secretInUrl" $it.value }}
{{- fail (printf "%s holds a user or password, which Helm would store and print: %s" $it.place $remedy) }}
{{- end }}
{{- end }}
{{- end }}
{{- if .Values.existingSecret }}
{{- if eq "{}" (include "tollkeeper.secretKeys" .) }}
{{- fail "existingSecret is set and existingSecretKeys names none of its keys, so nothing of it is used: name them" }}
{{- end }}
{{- else }}
{{- range $name, $key := .Values.existingSecretKeys }}
{{- if $key }}{{ fail (printf "existingSecretKeys.%s is set and existingSecret is not: set existingSecret" $name) }}{{ end }}
{{- end }}
{{- end }}
{{- if and (or .Values.redis.tls.enabled .Values.existingSecretKeys.redisAuth .Values.existingSecretKeys.redisSentinelAuth) (not (include "tollkeeper.sharesCounters" .)) }}
{{- fail "TLS or a password for Redis is set and redis.url is not: set redis.url" }}
{{- end }}
{{- end }}

{{/* `true` if a URL has user information or a password in its query. */}}
{{- define "tollkeeper.secretInUrl" -}}
{{- if or (regexMatch "^[^/]*@|://[^/]*@" .) (regexMatch "[?&](username|password)=" .) }}true{{ end }}
{{- end }}

{{/* Settings that other parts of the manifests rest on have values of their own. */}}
{{- define "tollkeeper.validateNames" -}}
{{- $owned := dict
  "GRPC_PORT" "ports.grpc" "PORT" "ports.http" "DEBUG_PORT" "debug.port" "GRPC_SERVER_USE_TLS" "tls.enabled"
  "TOLLKEEPER_HTTP_TLS_CERT" "tls.http" "TOLLKEEPER_HTTP_TLS_KEY" "tls.http"
  "USE_PROMETHEUS" "metrics.enabled" "PROMETHEUS_ADDR" "metrics.port" "PROMETHEUS_PATH" "metrics.path"
  "RUNTIME_ROOT" "rules" "RUNTIME_SUBDIRECTORY" "rules" "RUNTIME_APPDIRECTORY" "rules"
  "TOLLKEEPER_MEMORY_BYTES" "memoryBytes"
  "TOLLKEEPER_DRAIN_PERIOD" "shutdown.drainSeconds" "TOLLKEEPER_SHUTDOWN_TIMEOUT" "shutdown.timeoutSeconds" }}
{{- $known := splitList "\n" (trim ($.Files.Get "files/settings.txt")) }}
{{- range $name, $_ := .Values.settings }}
{{- if hasKey $owned $name }}{{ fail (printf "settings.%s: the chart sets it from the value %s: set that" $name (get $owned $name)) }}{{ end }}
{{- if not (has $name $known) }}
{{- fail (printf "settings.%s is no setting: did you mean %s? (docs/reference/settings.md lists them; a variable of another version or of a library belongs in extraEnv)" $name (include "tollkeeper.nearestName" (list $name $known))) }}
{{- end }}
{{- end }}
{{- $set := include "tollkeeper.settings" . | fromJson }}
{{- range .Values.extraEnv }}
{{- if hasKey $owned .name }}{{ fail (printf "extraEnv: the chart sets %s from the value %s: set that" .name (get $owned .name)) }}{{ end }}
{{- if hasKey $set .name }}{{ fail (printf "extraEnv: %s is set already: put it into the value settings" .name) }}{{ end }}
{{- end }}
{{- end }}

{{/* The names of regions are in two values, and each region needs two Redis. */}}
{{- define "tollkeeper.validateRegions" -}}
{{- with .Values.regions }}
{{- if .name }}
{{- if not (has .name .names) }}
{{- fail (printf "regions.names does not have regions.name (%s): give the names of all regions, the same list in each" .name) }}
{{- end }}
{{- if lt (len .names) 2 }}
{{- fail "regions.names has one region: give all, or leave regions.name empty" }}
{{- end }}
{{- if not .globalRedis.url }}
{{- fail "regions.name is set and regions.globalRedis.url is not: set the address of the Redis that all regions reach" }}
{{- end }}
{{- if not (include "tollkeeper.sharesCounters" $) }}
{{- fail "regions.name is set and redis.url is not: each region needs a Redis of its own" }}
{{- end }}
{{- else if or .names .globalRedis.url .globalRedis.tls }}
{{- fail "regions.names or regions.globalRedis is set and regions.name is not: set the name of this region" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tollkeeper.validateTls" -}}
{{- with .Values.tls }}
{{- if and .enabled (not .existingSecret) }}
{{- fail "tls.enabled is true and tls.existingSecret names no Secret with the certificate: set it" }}
{{- end }}
{{- if and .http (not .enabled) }}
{{- fail "tls.http is true and tls.enabled is false: set tls.enabled" }}
{{- end }}
{{- if and (or .clientCAKey .clientSAN) (not .enabled) }}
{{- fail "tls.clientCAKey or tls.clientSAN is set and tls.enabled is false: certificates of clients would not be checked; set tls.enabled" }}
{{- end }}
{{- if and .clientSAN (not .clientCAKey) }}
{{- fail "tls.clientSAN is set and tls.clientCAKey is not: no certificate of a client would be asked for; set tls.clientCAKey" }}
{{- end }}
{{- end }}
{{- if ne (empty .Values.redis.tls.certKey) (empty .Values.redis.tls.keyKey) }}
{{- fail "redis.tls.certKey and redis.tls.keyKey go together: set both or none" }}
{{- end }}
{{- end }}

{{/* The kernel kills a process that reaches its memory limit, and with it all counters in memory. */}}
{{- define "tollkeeper.validateMemory" -}}
{{- $limit := dig "limits" "memory" "" .Values.resources }}
{{- $limitBytes := include "tollkeeper.bytes" $limit }}
{{- if $limitBytes }}
{{- $needed := add (include "tollkeeper.bytes" .Values.memoryBytes) 67108864 | mulf 1.25 | int64 }}
{{- if lt (int64 $limitBytes) $needed }}
{{- fail (printf "resources.limits.memory is %s, and the process may need %d MiB: memoryBytes (%s) and 64 MiB, and a quarter of both: raise the limit, or lower memoryBytes" (toString $limit) (div (add $needed 1048575) 1048576) .Values.memoryBytes) }}
{{- end }}
{{- end }}
{{- end }}

{{/*
Most similar name. Takes a list: a name, and the names to choose from. Similar are long equal beginnings and ends, so a name
with one wrong, missing or additional character finds the right one.
*/}}
{{- define "tollkeeper.nearestName" -}}
{{- $name := first . }}{{ $best := dict "name" "" "score" -1000 }}
{{- range $other := last . }}
{{- $shorter := min (len $name) (len $other) | int }}
{{- $equal := dict "prefix" 0 "suffix" 0 }}
{{- range $n := untilStep 1 (int (add $shorter 1)) 1 }}
{{- if hasPrefix (substr 0 $n $name) $other }}{{ $_ := set $equal "prefix" $n }}{{ end }}
{{- if hasSuffix (substr (sub (len $name) $n | int) (len $name) $name) $other }}{{ $_ := set $equal "suffix" $n }}{{ end }}
{{- end }}
{{- $covered := min $shorter (add $equal.prefix $equal.suffix) }}
{{- $score := sub (mul 2 $covered) (add (len $name) (len $other)) | int }}
{{- if gt $score $best.score }}{{ $_ := set $best "name" $other }}{{ $_ := set $best "score" $score }}{{ end }}
{{- end }}
{{- $best.name }}
{{- end }}
