# Installs Kueue by its own manifests, with the configuration of the example.

# Writes the manifests to $cluster/kueue. Differences from a release: the controller is mounted from
# the host into the tests' image, and it gets the address of the API server, because there is no
# kube-proxy.
render_kueue() { # render_kueue PROGRAM
  local module dir=$cluster/kueue
  module=$(cd "$here/kueue" && go list -m -f '{{.Dir}}' sigs.k8s.io/kueue)
  mkdir -p "$dir"
  cp -r "$module/config" "$dir/config"
  chmod -R u+w "$dir/config"
  install -m755 "$1" "$dir/manager"
  cat "$repo/manifests/examples/kueue/configuration.yaml" >> "$dir/config/components/manager/controller_manager_config.yaml"
  cat > "$dir/kustomization.yaml" <<END
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [config/default]
patches:
  - patch: |
      apiVersion: apps/v1
      kind: Deployment
      metadata: {name: kueue-controller-manager, namespace: kueue-system}
      spec:
        template:
          spec:
            securityContext: {runAsUser: 65532}
            containers:
              - name: manager
                image: localhost/glibc:1
                imagePullPolicy: Never
                env:
                  - {name: KUBERNETES_SERVICE_HOST, value: "$apiserver"}
                  - {name: KUBERNETES_SERVICE_PORT, value: "$apiserver_port"}
                volumeMounts:
                  - {name: program, mountPath: /manager}
            volumes:
              - name: program
                hostPath: {path: "$dir/manager", type: File}
END
}

# Installs Kueue, and waits until its webhooks answer.
install_kueue() { # install_kueue PROGRAM
  render_kueue "$1"
  kubectl apply --server-side -k "$cluster/kueue" > /dev/null
  wait_for "Kueue's controller" 180 kubectl -n kueue-system wait --for=condition=Available \
    deployment/kueue-controller-manager --timeout=1s
  cat > "$cluster/kueue/probe.yaml" <<END
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: probe}
spec: {}
END
  wait_for "Kueue's webhooks" 120 kubectl create --dry-run=server -f "$cluster/kueue/probe.yaml"
}
