{{- /*
A part is what templates hand to the helpers here:
  root        the chart's context
  component   frontend, router, worker, kvbm, pool-workers, nats or etcd; picker and pool have a name alone
  set         of workers: the name of their set
  values      of our services: the part's values; image, resources, settings, nodeSelector and others
  grace       seconds from SIGTERM to SIGKILL
  fixed       settings that the chart makes itself, which override those of values
  command     words in place of those that start the service of the component; such a pod has no settings and no probes
  account     its service account, if it may ask the API server
  env, ports, mounts, volumes, init      what its pod has in addition
The last two lines come from a template of the service's own, as YAML.
*/}}

{{- define "headrace.name" -}}
{{ .root.Release.Name }}-{{ .component }}{{ with .set }}-{{ . }}{{ end }}
{{- end }}

{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .set }}
headrace/set: {{ . }}
{{- end }}
{{- end }}

{{- define "headrace.metadata" -}}
name: {{ include "headrace.name" . }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "headrace.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "headrace.image" -}}
{{- $image := mergeOverwrite (deepCopy .root.Values.image) (.image | default dict) -}}
{{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "headrace.natsUrl" -}}
{{ .Values.nats.deploy | ternary (printf "nats://%s-nats.%s.svc:4222" .Release.Name .Release.Namespace) .Values.nats.url }}
{{- end }}

{{- define "headrace.etcdHost" -}}
{{ .Release.Name }}-etcd.{{ .Release.Namespace }}.svc
{{- end }}

{{- define "headrace.etcdEndpoints" -}}
{{ .Values.etcd.deploy | ternary (list (printf "%s:2379" (include "headrace.etcdHost" .))) .Values.etcd.endpoints | toJson }}
{{- end }}

{{- /* Settings as variables of a container. */}}
{{- define "headrace.variables" -}}
{{- range $key, $value := .table }}
{{- $name := printf "%s_%s" $.name (upper $key) }}
{{- if kindIs "map" $value }}
{{- include "headrace.variables" (dict "name" $name "table" $value) }}
{{- else if not (kindIs "invalid" $value) }}
- { name: {{ $name }}, value: {{ kindIs "slice" $value | ternary (join "," $value) (kindIs "string" $value | ternary $value (toJson $value)) | quote }} }
{{- end }}
{{- end }}
{{- end }}

{{- /* The settings of a service, as YAML. A later map overrides an earlier one. */}}
{{- define "headrace.settings" -}}
{{- $values := .root.Values }}
{{- $nats := dict "url" (include "headrace.natsUrl" .root) }}
{{- $etcd := dict "endpoints" (include "headrace.etcdEndpoints" .root | fromJsonArray) }}
{{- $own := dict "namespace" $values.fleet "nats" $nats "discovery" $etcd "observe" (dict "port" 9100) }}
{{- mustMergeOverwrite (deepCopy $values.settings) (deepCopy (.values.settings | default dict)) $own (.fixed | default dict) | toYaml }}
{{- end }}

{{- /* A map as TOML: its scalars and lists, which TOML writes as JSON does, then its tables. */}}
{{- define "headrace.toml" -}}
{{- range $key, $value := .table }}{{ if not (or (kindIs "map" $value) (kindIs "invalid" $value)) }}
{{ toJson $key }} = {{ toJson $value }}
{{- end }}{{ end }}
{{- range $key, $value := .table }}{{ if kindIs "map" $value }}
{{- $path := append $.path (toJson $key) }}

[{{ join "." $path }}]
{{- include "headrace.toml" (dict "path" $path "table" $value) }}
{{- end }}{{ end }}
{{- end }}

{{- define "headrace.file" -}}
{{- include "headrace.toml" (dict "path" list "table" (include "headrace.settings" . | fromYaml)) | trim }}
{{- end }}

{{- define "headrace.configMap" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  {{- include "headrace.metadata" . | nindent 2 }}
data:
  settings.toml: |
    {{- include "headrace.file" . | nindent 4 }}
{{- end }}

{{- define "headrace.pdb" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "headrace.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "headrace.selector" . | nindent 6 }}
{{- end }}

{{- define "headrace.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{- /* What a pod of ours and of the servers has, above its containers. */}}
{{- define "headrace.podSettings" -}}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" }}
{{- with get ($.values | default dict) $field }}
{{ $field }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
automountServiceAccountToken: false # the pod that needs the token mounts it by name
{{- with .account }}
serviceAccountName: {{ . }}
{{- end }}
enableServiceLinks: false # variables such as HEADRACE_NATS_PORT would be unknown settings
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- /* The pod of a service. */}}
{{- define "headrace.pod" -}}
{{- $values := .root.Values -}}
metadata:
  labels:
    {{- include "headrace.selector" . | nindent 4 }}
  {{- if or (not .command) .values.podAnnotations }}
  annotations:
    {{- if not .command }}
    checksum/settings: {{ include "headrace.file" . | sha256sum }}
    {{- end }}
    {{- with .values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
spec:
  terminationGracePeriodSeconds: {{ .grace }} # SIGTERM drains
  shareProcessNamespace: true # the pause container is process 1 and reaps, as `init: true` does in Compose
  {{- include "headrace.podSettings" . | nindent 2 }}
  {{- if ne .component "kvbm" }}
  topologySpreadConstraints:
    {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
    - maxSkew: 1
      topologyKey: {{ . }}
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "headrace.selector" $ | nindent 10 }}
    {{- end }}
  {{- end }}
  {{- with .init }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "headrace.image" (dict "root" .root "image" .values.image) }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args:
        {{- .command | default (list (printf "services.%s" .component) "--config" "/etc/headrace/settings/settings.toml") | toYaml | nindent 8 }}
      env:
        - name: HEADRACE_OBSERVE_HOST # routers and Prometheus reach a pod by its address: its name is in no DNS
          valueFrom: { fieldRef: { fieldPath: status.podIP } }
        {{- /* Users are in the environment and not in the file, so that `headrace status` has them too. */}}
        {{- if $values.nats.secret }}
        - { name: HEADRACE_NATS_USER, value: {{ $values.nats.user | quote }} }
        - { name: HEADRACE_NATS_INBOX, value: {{ $values.nats.inbox | quote }} }
        - { name: HEADRACE_NATS_PASSWORD_FILE, value: /etc/headrace/nats/password }
        {{- end }}
        {{- if $values.etcd.secret }}
        - { name: HEADRACE_DISCOVERY_USER, value: {{ $values.etcd.user | quote }} }
        - { name: HEADRACE_DISCOVERY_PASSWORD_FILE, value: /etc/headrace/etcd/password }
        {{- end }}
        {{- with concat (.env | default list) (.values.env | default list) }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if not .command }}
      ports:
        - { name: observe, containerPort: 9100 }
        {{- with .ports }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      startupProbe:
        httpGet: { path: /live, port: observe }
        periodSeconds: 2
        failureThreshold: 150
      livenessProbe: # the event loop turns; neither load nor a server that is away ends a process
        httpGet: { path: /live, port: observe }
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet: { path: /health, port: observe }
        periodSeconds: 2
        timeoutSeconds: 5
        failureThreshold: 2
      {{- end }}
      resources:
        {{- toYaml .values.resources | nindent 8 }}
      securityContext:
        {{- include "headrace.restricted" . | nindent 8 }}
      volumeMounts:
        {{- if not .command }}
        - { name: settings, mountPath: /etc/headrace/settings, readOnly: true }
        {{- end }}
        - { name: tmp, mountPath: /tmp }
        {{- if $values.nats.secret }}
        - { name: nats-password, mountPath: /etc/headrace/nats, readOnly: true }
        {{- end }}
        {{- if $values.etcd.secret }}
        - { name: etcd-password, mountPath: /etc/headrace/etcd, readOnly: true }
        {{- end }}
        {{- with concat (.mounts | default list) (.values.volumeMounts | default list) }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- if not .command }}
    - name: settings
      configMap: { name: {{ include "headrace.name" . }} }
    {{- end }}
    - name: tmp
      emptyDir: { sizeLimit: 1Gi }
    {{- if $values.nats.secret }}
    - name: nats-password
      secret: { secretName: {{ $values.nats.secret }}, items: [{ key: services-password, path: password }], defaultMode: 0440 }
    {{- end }}
    {{- if $values.etcd.secret }}
    - name: etcd-password
      secret: { secretName: {{ $values.etcd.secret }}, items: [{ key: services-password, path: password }], defaultMode: 0440 }
    {{- end }}
    {{- with concat (.volumes | default list) (.values.volumes | default list) }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- /* The volume of models and converted weights. A worker sends frontends what they need of them. */}}
{{- define "headrace.models" -}}
{{ dict "name" "models" | mergeOverwrite (deepCopy .Values.models.volume | default (dict "persistentVolumeClaim" (dict "claimName" (printf "%s-models" .Release.Name)))) | toYaml }}
{{- end }}

{{- /* The directory of a node's memory that kvbm and the workers of the node share. */}}
{{- define "headrace.pool" -}}
name: pool
hostPath: { path: {{ .Values.kvbm.hostPath }}/headrace-{{ .Release.Namespace }}-{{ .Release.Name }}, type: DirectoryOrCreate }
{{- end }}
