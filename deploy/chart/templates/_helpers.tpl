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
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/*
Labels of an object. Takes a list: the context, then labels of the object; those of the chart go before them.
*/}}
{{- define "tollkeeper.labels" -}}
{{- $ := first . }}
{{- $labels := include "tollkeeper.selector" $ | fromYaml }}
{{- $_ := set $labels "app.kubernetes.io/version" $.Chart.AppVersion }}
{{- $_ := set $labels "app.kubernetes.io/managed-by" $.Release.Service }}
{{- $_ := set $labels "helm.sh/chart" (printf "%s-%s" $.Chart.Name $.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-") }}
{{- range rest . }}{{ $labels = merge $labels . }}{{ end }}
{{- merge $labels $.Values.commonLabels | toYaml }}
{{- end }}

{{/*
Annotations of an object, as a block with its key; nothing if there are none. Takes a list: the context, then annotations
of the object, which take precedence over commonAnnotations.
*/}}
{{- define "tollkeeper.annotations" -}}
{{- $ := first . }}
{{- $annotations := dict }}
{{- range rest . }}{{ $annotations = merge $annotations . }}{{ end }}
{{- with merge $annotations $.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/*
Selector of a pod that the Service must not select: the rule check and the test. Takes a list: the context, the role.
*/}}
{{- define "tollkeeper.roleSelector" -}}
{{- $ := first . }}
app.kubernetes.io/name: {{ include "tollkeeper.name" $ | trunc 52 }}-{{ last . }}
app.kubernetes.io/instance: {{ $.Release.Name | quote }}
{{- end }}

{{/* Labels of such a pod. Takes a list: the context, the role. */}}
{{- define "tollkeeper.roleLabels" -}}
{{- $ := first . }}
{{- merge (include "tollkeeper.roleSelector" . | fromYaml) $.Values.commonLabels | toYaml }}
{{- end }}

{{- define "tollkeeper.image" -}}
{{- $registry := .Values.global.imageRegistry }}
{{- with .Values.image }}
{{- if not .repository }}
{{- fail "image.repository is not set, and no image is published under a fixed name: build one with `docker build -f deploy/Dockerfile -t REGISTRY/tollkeeper:VERSION .`, push it, and set image.repository=REGISTRY/tollkeeper (and image.tag, if VERSION is not the chart's appVersion)" }}
{{- end }}
{{- $repository := ternary (printf "%s/%s" $registry .repository) .repository (not (empty $registry)) }}
{{- if .digest }}
{{- printf "%s@%s" $repository .digest }}
{{- else }}
{{- printf "%s:%s" $repository (default $.Chart.AppVersion .tag) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tollkeeper.pullSecrets" -}}
{{- $secrets := list }}
{{- range concat .Values.global.imagePullSecrets .Values.imagePullSecrets }}
{{- $secrets = append $secrets (ternary (dict "name" .) . (kindIs "string" .)) }}
{{- end }}
{{- with uniq $secrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "tollkeeper.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "tollkeeper.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* Name of the chart's ConfigMap of rules; empty if the rules have another source. */}}
{{- define "tollkeeper.rulesConfigMap" -}}
{{- if and (not .Values.rulesVolume) (or .Values.rules (not .Values.existingConfigMaps)) }}
{{- printf "%s-rules" (include "tollkeeper.fullname" . | trunc 57) }}
{{- end }}
{{- end }}

{{/* Rule files of the chart's ConfigMap. */}}
{{- define "tollkeeper.rulesData" -}}
{{- $files := dict }}
{{- range $name, $rules := .Values.rules }}
{{- $_ := set $files $name (ternary $rules (toYaml $rules) (kindIs "string" $rules)) }}
{{- else }}
{{- $_ := set $files "example.yaml" (.Files.Get "files/rules.yaml") }}
{{- end }}
{{- $size := 0 }}
{{- range $name, $text := $files }}{{ $size = add $size (len $name) (len $text) }}{{ end }}
{{- if gt $size 1048576 }}
{{- fail (printf "rules has %d bytes, and a ConfigMap holds 1048576: put files into ConfigMaps of your own, at most 1 MiB each, and name them in existingConfigMaps, or set rulesVolume" $size) }}
{{- end }}
{{- toYaml $files }}
{{- end }}

{{/* Name of the ConfigMap of ruleDefaults. */}}
{{- define "tollkeeper.defaultsConfigMap" -}}
{{- printf "%s-rule-defaults" (include "tollkeeper.fullname" . | trunc 49) }}
{{- end }}

{{/* File of defaults. */}}
{{- define "tollkeeper.defaultsData" -}}
{{- dict "defaults.yaml" (dict "defaults" .Values.ruleDefaults | toYaml) | toYaml }}
{{- end }}

{{/* Volume of the rule files. Takes a list: the context, the name of the chart's ConfigMap. */}}
{{- define "tollkeeper.rulesVolume" -}}
{{- $ := first . }}
- name: rules
  {{- if $.Values.rulesVolume }}
  {{- toYaml $.Values.rulesVolume | nindent 2 }}
  {{- else }}
  projected:
    sources:
      {{- if include "tollkeeper.rulesConfigMap" $ }}
      - configMap: { name: {{ last . | quote }} }
      {{- end }}
      {{- range $.Values.existingConfigMaps }}
      - configMap: { name: {{ . | quote }} }
      {{- end }}
  {{- end }}
{{- end }}

{{/* Used keys of the Secret as JSON, by their names in existingSecretKeys. */}}
{{- define "tollkeeper.secretKeys" -}}
{{- $keys := dict }}
{{- if .Values.existingSecret }}
{{- range $name, $key := .Values.existingSecretKeys }}{{ if $key }}{{ $_ := set $keys $name $key }}{{ end }}{{ end }}
{{- end }}
{{- toJson $keys }}
{{- end }}

{{/*
Number of replicas; empty leaves it to the autoscaler. A manifest without a number that had one before makes it 1 until the
autoscaler acts, so an upgrade names what runs, and at least minReplicas; 0, by which people stop it, stays. `helm template`
sees no cluster and names none.
*/}}
{{- define "tollkeeper.replicas" -}}
{{- if .Values.autoscaling.enabled }}
{{- $live := lookup "apps/v1" "Deployment" .Release.Namespace (include "tollkeeper.fullname" .) }}
{{- if $live }}
{{- $running := dig "spec" "replicas" 1 $live | int }}
{{- ternary 0 (max $running (int .Values.autoscaling.minReplicas)) (eq $running 0) }}
{{- end }}
{{- else }}
{{- .Values.replicaCount }}
{{- end }}
{{- end }}

{{/* `true` if replicas share counters, in Redis or memcache: by `redis.url`, a REDIS_ variable or BACKEND_TYPE. */}}
{{- define "tollkeeper.sharesCounters" -}}
{{- $names := keys .Values.settings }}
{{- range .Values.extraEnv }}{{ $names = append $names .name }}{{ end }}
{{- $shares := not (empty .Values.redis.url) }}
{{- range $names }}{{ if or (hasPrefix "REDIS_" .) (eq "BACKEND_TYPE" .) }}{{ $shares = true }}{{ end }}{{ end }}
{{- if $shares }}true{{ end }}
{{- end }}

{{/*
Ports of a Redis as a JSON list. Takes a list: the settings, the prefix of its settings. An address without a port has
that of its protocol; a unix socket has none.
*/}}
{{- define "tollkeeper.redisPorts" -}}
{{- $settings := first . }}{{ $prefix := last . }}{{ $ports := list }}
{{- $sentinel := eq "sentinel" (lower (default "" (get $settings (printf "%sTYPE" $prefix)))) }}
{{- $addresses := splitList "," (default "" (get $settings (printf "%sURL" $prefix))) }}
{{- if and $sentinel (gt (len $addresses) 1) }}
{{- $ports = append $ports 6379 }}
{{- $addresses = rest $addresses }}
{{- end }}
{{- range $address := $addresses }}
{{- $address = trim $address }}
{{- if and $address (not (hasPrefix "/" $address)) }}
{{- $host := regexReplaceAll "^[A-Za-z]+://" $address "" | regexFind "^[^/?]*" }}
{{- $port := regexFind ":[0-9]+$" $host | trimPrefix ":" }}
{{- $ports = append $ports (int (default (ternary 26379 6379 $sentinel) $port)) }}
{{- end }}
{{- end }}
{{- $ports | uniq | toJson }}
{{- end }}

{{/* Ports of the Redis that all regions reach, as a JSON list. */}}
{{- define "tollkeeper.globalRedisPorts" -}}
{{- $settings := include "tollkeeper.settings" . | fromJson }}
{{- range .Values.extraEnv }}{{ if hasKey . "value" }}{{ $_ := set $settings .name (toString .value) }}{{ end }}{{ end }}
{{- include "tollkeeper.redisPorts" (list $settings "TOLLKEEPER_GLOBAL_REDIS_") }}
{{- end }}

{{/*
Ports of Redis or memcached as a JSON list: networkPolicy.redisPorts, or those of the addresses.
*/}}
{{- define "tollkeeper.storePorts" -}}
{{- $ports := list }}
{{- if .Values.networkPolicy.redisPorts }}
{{- range .Values.networkPolicy.redisPorts }}{{ $ports = append $ports (int .) }}{{ end }}
{{- else }}
{{- $settings := include "tollkeeper.settings" . | fromJson }}
{{- range .Values.extraEnv }}{{ if hasKey . "value" }}{{ $_ := set $settings .name (toString .value) }}{{ end }}{{ end }}
{{- $memcache := eq "memcache" (default "" (get $settings "BACKEND_TYPE")) }}
{{- if $memcache }}
{{- range splitList "," (default "" (get $settings "MEMCACHE_HOST_PORT")) }}
{{- with regexFind ":[0-9]+$" (trim .) }}{{ $ports = append $ports (int (trimPrefix ":" .)) }}{{ end }}
{{- end }}
{{- end }}
{{- range $prefix := ternary (list) (list "REDIS_" "REDIS_PERSECOND_") $memcache }}
{{- $ports = concat $ports (include "tollkeeper.redisPorts" (list $settings $prefix) | fromJsonArray) }}
{{- end }}
{{- $address := get $settings (ternary "MEMCACHE_HOST_PORT" "REDIS_URL" $memcache) }}
{{- if and (not $ports) (include "tollkeeper.sharesCounters" .) (not (hasPrefix "/" (default "" $address))) }}
{{- fail "networkPolicy.enabled is true and the address of the store is in no value, so its port is unknown: set networkPolicy.redisPorts" }}
{{- end }}
{{- end }}
{{- $ports | uniq | toJson }}
{{- end }}

{{/* `true` if connections to Redis use the certificates of redis.tls.existingSecret. */}}
{{- define "tollkeeper.redisCertificates" -}}
{{- if and .Values.redis.tls.existingSecret (or .Values.redis.tls.enabled .Values.regions.globalRedis.tls) }}true{{ end }}
{{- end }}

{{/* Settings of the process as JSON: those of the chart, then the value `settings`, which takes precedence. */}}
{{- define "tollkeeper.settings" -}}
{{- $secrets := include "tollkeeper.secretKeys" . | fromJson }}
{{- $all := dict
  "RUNTIME_ROOT" "/data" "RUNTIME_SUBDIRECTORY" "ratelimit" "RUNTIME_APPDIRECTORY" "config"
  "RUNTIME_WATCH_ROOT" "false" "RUNTIME_IGNOREDOTFILES" "true"
  "HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED" "true"
  "GRPC_PORT" (toString .Values.ports.grpc) "PORT" (toString .Values.ports.http)
  "DEBUG_HOST" .Values.debug.host "DEBUG_PORT" (toString .Values.debug.port)
  "GRPC_MAX_CONNECTION_AGE" .Values.maxConnectionAge
  "TOLLKEEPER_MEMORY_BYTES" .Values.memoryBytes
  "TOLLKEEPER_DRAIN_PERIOD" (printf "%ds" (int .Values.shutdown.drainSeconds))
  "TOLLKEEPER_SHUTDOWN_TIMEOUT" (printf "%ds" (int .Values.shutdown.timeoutSeconds)) }}
{{- if .Values.ruleDefaults }}
{{- $_ := set $all "TOLLKEEPER_RULE_DEFAULTS" "/etc/tollkeeper/rule-defaults/defaults.yaml" }}
{{- end }}
{{- if .Values.metrics.enabled }}
{{- $_ := merge $all (dict
  "USE_PROMETHEUS" "true" "PROMETHEUS_ADDR" (printf ":%d" (int .Values.metrics.port)) "PROMETHEUS_PATH" .Values.metrics.path) }}
{{- end }}
{{- with .Values.redis }}
{{- if .url }}
{{- $_ := merge $all (dict "REDIS_URL" .url "REDIS_TYPE" .type) }}
{{- end }}
{{- if .tls.enabled }}{{ $_ := set $all "REDIS_TLS" "true" }}{{ end }}
{{- if include "tollkeeper.redisCertificates" $ }}
{{- with .tls.caKey }}{{ $_ := set $all "REDIS_TLS_CACERT" (printf "/etc/tollkeeper/redis-tls/%s" .) }}{{ end }}
{{- with .tls.certKey }}{{ $_ := set $all "REDIS_TLS_CLIENT_CERT" (printf "/etc/tollkeeper/redis-tls/%s" .) }}{{ end }}
{{- with .tls.keyKey }}{{ $_ := set $all "REDIS_TLS_CLIENT_KEY" (printf "/etc/tollkeeper/redis-tls/%s" .) }}{{ end }}
{{- end }}
{{- end }}
{{- with .Values.regions }}
{{- if .name }}
{{- /* rediss:// in the first address, after the name that sentinels know the primary by, is TLS to all. */}}
{{- $url := ternary (regexReplaceAll "^([^,:/]+,)?(rediss?://)?" .globalRedis.url "${1}rediss://") .globalRedis.url .globalRedis.tls }}
{{- $_ := merge $all (dict
  "TOLLKEEPER_REGION" .name "TOLLKEEPER_REGIONS" (join "," .names)
  "TOLLKEEPER_GLOBAL_REDIS_URL" $url "TOLLKEEPER_GLOBAL_REDIS_TYPE" .globalRedis.type
  "TOLLKEEPER_GLOBAL_REDIS_WAIT_REPLICAS" (toString (int .globalRedis.waitReplicas))) }}
{{- end }}
{{- end }}
{{- range $name, $setting := dict
  "redisAuth" "REDIS_AUTH_FILE" "redisSentinelAuth" "TOLLKEEPER_REDIS_SENTINEL_AUTH_FILE"
  "redisPerSecondAuth" "REDIS_PERSECOND_AUTH_FILE"
  "redisPerSecondSentinelAuth" "TOLLKEEPER_REDIS_PERSECOND_SENTINEL_AUTH_FILE"
  "globalRedisAuth" "TOLLKEEPER_GLOBAL_REDIS_AUTH_FILE"
  "globalRedisSentinelAuth" "TOLLKEEPER_GLOBAL_REDIS_SENTINEL_AUTH_FILE"
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

{{/* Variables of the environment, as entries of `env`. */}}
{{- define "tollkeeper.env" -}}
{{- range $name, $value := include "tollkeeper.settings" . | fromJson }}
- { name: {{ $name }}, value: {{ $value | quote }} }
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Bytes of a size (256MiB) or of a Kubernetes quantity (256Mi, 1.5G); empty for other forms. */}}
{{- define "tollkeeper.bytes" -}}
{{- /* A number of a values file is a float. */}}
{{- $text := kindIs "float64" . | ternary (printf "%.0f" .) (toString .) }}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000
  "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 }}
{{- if regexMatch "^[0-9]+([.][0-9]+)?([kMGT]|[KMGT]iB?)?$" $text }}
{{- $unit := regexFind "[A-Za-z]*$" $text | trimSuffix "B" }}
{{- mulf (float64 (regexFind "^[0-9.]+" $text)) (get $units $unit) | int64 }}
{{- end }}
{{- end }}
