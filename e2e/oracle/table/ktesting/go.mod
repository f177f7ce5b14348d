module k8s.io/ktesting

go 1.26.0

require github.com/onsi/gomega v1.40.0
