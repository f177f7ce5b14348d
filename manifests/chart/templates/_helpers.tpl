{{- define "divvy.name" -}}
{{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Truncated, so that the longest derived name fits into a label. */}}
{{- define "divvy.fullname" -}}
{{- $name := include "divvy.name" . -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 48 | trimSuffix "-" }}
{{- else if contains $name .Release.Name -}}
{{ .Release.Name | trunc 48 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $name | trunc 48 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "divvy.namespace" -}}
{{- $namespace := default .Release.Namespace .Values.namespaceOverride -}}
{{- if and (eq $namespace "default") (not .Values.allowDefaultNamespace) -}}
{{ fail "Divvy must be installed into a namespace of its own: helm install --namespace divvy --create-namespace, or set allowDefaultNamespace=true" }}
{{- end -}}
{{ $namespace }}
{{- end }}

{{/* Labels of an object: (list $ component). */}}
{{- define "divvy.labels" -}}
{{ include "divvy.selector" . }}
{{- with index . 0 }}
app.kubernetes.io/part-of: divvy
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}
{{- end }}

{{/* Labels that never change, for selectors. */}}
{{- define "divvy.selector" -}}
app.kubernetes.io/name: {{ include "divvy.name" (index . 0) }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Labels of a pod: without a version, so that a pod is replaced only when its content changes. */}}
{{- define "divvy.podLabels" -}}
{{ include "divvy.selector" . }}
app.kubernetes.io/part-of: divvy
{{- end }}

{{/* Name, namespace and labels of an object: (list $ component). */}}
{{- define "divvy.meta" -}}
name: {{ include "divvy.fullname" (index . 0) }}-{{ index . 1 }}
namespace: {{ include "divvy.namespace" (index . 0) }}
labels:
  {{- include "divvy.labels" . | nindent 2 }}
{{- end }}

{{/* The same for a cluster-scoped object. */}}
{{- define "divvy.clusterMeta" -}}
name: {{ include "divvy.fullname" (index . 0) }}-{{ index . 1 }}
labels:
  {{- include "divvy.labels" . | nindent 2 }}
{{- end }}

{{- define "divvy.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- define "divvy.logLevel" -}}
{{- $level := toString .Values.logVerbosity -}}
{{- if not (regexMatch "^[0-9]+$" $level) }}{{ $level }}
{{- else if lt (int $level) 5 }}info
{{- else if lt (int $level) 7 }}debug
{{- else }}trace
{{- end }}
{{- end }}

{{/* Environment of all programs. */}}
{{- define "divvy.env" -}}
- name: DIVVY_LOG_LEVEL
  value: {{ include "divvy.logLevel" . | quote }}
- name: DIVVY_LOG_FORMAT
  value: {{ .Values.logFormat }}
{{- end }}

{{/* Environment of programs that use the API server. */}}
{{- define "divvy.apiEnv" -}}
{{- if .Values.k8sServiceHost }}
- name: KUBERNETES_SERVICE_HOST
  value: {{ .Values.k8sServiceHost | quote }}
{{- end }}
{{- if .Values.k8sServicePort }}
- name: KUBERNETES_SERVICE_PORT
  value: {{ .Values.k8sServicePort | quote }}
{{- end }}
{{- end }}

{{/* Mount point of the host's root in node pods: driver root and device nodes. */}}
{{- define "divvy.hostPrefix" -}}/host{{- end }}

{{- define "divvy.driverRoot" -}}
{{ .Values.nvidiaDriverRoot | clean }}
{{- end }}

{{- define "divvy.driverRootSeen" -}}
{{ printf "%s%s" (include "divvy.hostPrefix" .) (include "divvy.driverRoot" .) | clean }}
{{- end }}

{{/* A path of the host as a pod of a node sees it: (list $ path standard). */}}
{{- define "divvy.seen" -}}
{{- if eq (index . 1 | clean) (index . 2) -}}
{{ index . 2 }}
{{- else -}}
{{ printf "%s%s" (include "divvy.hostPrefix" (index . 0)) (index . 1 | clean) }}
{{- end }}
{{- end }}

{{- define "divvy.nodeSelector" -}}
kubernetes.io/os: linux
kubernetes.io/arch: amd64
{{- end }}

{{/* The GPU driver and the device nodes, for the pods of a node. */}}
{{- define "divvy.driverMounts" -}}
# Writable, because the nvidia-modprobe of a driver image creates device nodes in it.
- name: driver-root
  mountPath: {{ include "divvy.driverRootSeen" . }}
  mountPropagation: HostToContainer
# The host's /dev, because the device node of a GPU that appears later is created there.
- name: dev
  mountPath: /dev
{{- if ne (include "divvy.driverRoot" .) "/" }}
- name: dev
  mountPath: {{ include "divvy.hostPrefix" . }}/dev
{{- end }}
{{- end }}

{{- define "divvy.driverVolumes" -}}
- name: driver-root
  hostPath:
    path: {{ include "divvy.driverRoot" . }}
    type: DirectoryOrCreate
- name: dev
  hostPath:
    path: /dev
    type: Directory
{{- end }}

{{/* Security context of pods that do not use a GPU. */}}
{{- define "divvy.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "divvy.restrictedPod" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "divvy.webhookSecret" -}}
{{- if eq .Values.webhook.tls.mode "secret" -}}
{{ required "webhook.tls.secret.name is needed with webhook.tls.mode=secret" .Values.webhook.tls.secret.name }}
{{- else -}}
{{ include "divvy.fullname" . }}-webhook
{{- end }}
{{- end }}

{{/* GPU models as the controller reads them: MODEL=SIZE[:CLASS],... */}}
{{- define "divvy.foreignModels" -}}
{{- $models := list -}}
{{- range $name, $model := . -}}
{{- $class := $model.class | default "" -}}
{{- $models = append $models (printf "%s=%s%s" $name $model.memory (empty $class | ternary "" (printf ":%s" $class))) -}}
{{- end -}}
{{ join "," $models }}
{{- end }}
