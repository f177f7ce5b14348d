// Creates many objects in an API server, for benchmarks of the scheduler: nodes with slices, and pods with claims.
//
//	load [flags] nodes FILE       Node objects, each with copies of the ResourceSlices in a file
//	load [flags] claims REQUEST   a claim with this request (JSON) and a pod for it, until all pods have a node
//	load [flags] clear            deletes all pods and claims
//
// It sends protobuf over several connections. `claims` prints the seconds from the first pod to the last node.
package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
)

const (
	nodesPath  = "/api/v1/nodes"
	podsPath   = "/api/v1/namespaces/default/pods"
	slicesPath = "/apis/resource.k8s.io/v1/resourceslices"
	claimsPath = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
)

// Requests in flight. An API server on two processors is busy with four, and more only wait.
const parallel = 8

type server struct {
	ctx        context.Context
	url, token string
	http       http.Client
	encoder    runtime.Encoder
}

func connect(ctx context.Context, url, tokenFile, authorityFile string) (*server, error) {
	token, err := os.ReadFile(tokenFile)
	if err != nil {
		return nil, err
	}
	authority, err := os.ReadFile(authorityFile)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(authority) {
		return nil, fmt.Errorf("%s: no certificate", authorityFile)
	}
	scheme := runtime.NewScheme()
	utilruntime.Must(v1.AddToScheme(scheme))
	utilruntime.Must(resourceapi.AddToScheme(scheme))
	return &server{
		ctx:     ctx,
		url:     url,
		token:   strings.TrimSpace(string(token)),
		http:    http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, MaxIdleConnsPerHost: parallel}},
		encoder: protobuf.NewSerializer(scheme, scheme),
	}, nil
}

func (s *server) send(method, path, contentType string, body []byte) ([]byte, error) {
	request, err := http.NewRequestWithContext(s.ctx, method, s.url+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Authorization", "Bearer "+s.token)
	request.Header.Set("Content-Type", contentType)
	request.Header.Set("Accept", "application/json")
	if method == http.MethodPost {
		// The answer has the whole object, which is not needed.
		request.Header.Set("Accept", "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1")
	}
	answer, err := s.http.Do(request)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", method, path, err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", method, path, err)
	}
	if answer.StatusCode >= 300 {
		return nil, fmt.Errorf("%s %s: %s: %.500s", method, path, answer.Status, text)
	}
	return text, nil
}

func (s *server) create(path string, object runtime.Object) error {
	var body bytes.Buffer
	if err := s.encoder.Encode(object, &body); err != nil {
		return err
	}
	_, err := s.send(http.MethodPost, path, "application/vnd.kubernetes.protobuf", body.Bytes())
	return err
}

// Calls create for each number below count, several at a time, and reports the progress every 10 s. After an error it
// starts no further call.
func each(what string, count int, create func(int) error) error {
	var (
		lock   sync.Mutex
		next   int
		failed error
		begun  = time.Now()
		told   = begun
	)
	take := func() (int, bool) {
		lock.Lock()
		defer lock.Unlock()
		if time.Since(told) > 10*time.Second {
			told = time.Now()
			fmt.Fprintf(os.Stderr, "%s: %d of %d after %.0f s\n", what, next, count, time.Since(begun).Seconds())
		}
		next++
		return next - 1, next <= count && failed == nil
	}
	var workers sync.WaitGroup
	for range parallel {
		workers.Go(func() {
			for number, more := take(); more; number, more = take() {
				if err := create(number); err != nil {
					lock.Lock()
					failed = err
					lock.Unlock()
				}
			}
		})
	}
	workers.Wait()
	return failed
}

func (s *server) nodes(file string, count int) error {
	content, err := os.Open(file)
	if err != nil {
		return err
	}
	defer content.Close()
	var template []*resourceapi.ResourceSlice
	documents := json.NewDecoder(content)
	for {
		slice := &resourceapi.ResourceSlice{}
		if err := documents.Decode(slice); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		template = append(template, slice)
	}
	resources := v1.ResourceList{
		v1.ResourceCPU: resource.MustParse("128"), v1.ResourceMemory: resource.MustParse("1Ti"), v1.ResourcePods: resource.MustParse("110"),
	}
	return each("nodes", count, func(number int) error {
		name := fmt.Sprintf("node-%04d", number)
		err := s.create(nodesPath, &v1.Node{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Status: v1.NodeStatus{
				Capacity: resources, Allocatable: resources,
				Conditions: []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue}},
			},
		})
		if err != nil {
			return err
		}
		for index, slice := range template {
			copied := slice.DeepCopy()
			copied.TypeMeta = metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceSlice"}
			copied.ObjectMeta = metav1.ObjectMeta{
				Name:            fmt.Sprintf("%05d-%s-%s", index, slice.Spec.Driver, name),
				OwnerReferences: copied.OwnerReferences,
			}
			for i := range copied.OwnerReferences {
				copied.OwnerReferences[i].Name = name
			}
			copied.Spec.NodeName = &name
			copied.Spec.Pool.Name = name
			if err := s.create(slicesPath, copied); err != nil {
				return err
			}
		}
		return nil
	})
}

func (s *server) claims(request, prefix string, count int) (time.Duration, error) {
	var wanted resourceapi.ExactDeviceRequest
	if err := json.Unmarshal([]byte(request), &wanted); err != nil {
		return 0, fmt.Errorf("%s: %w", request, err)
	}
	name := func(number int) metav1.ObjectMeta {
		return metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", prefix, number), Namespace: metav1.NamespaceDefault}
	}
	// All claims first: a pod that the scheduler reads before its claim waits for a back-off.
	err := each("claims", count, func(number int) error {
		return s.create(claimsPath, &resourceapi.ResourceClaim{
			TypeMeta:   metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaim"},
			ObjectMeta: name(number),
			Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
				Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &wanted}},
			}},
		})
	})
	if err != nil {
		return 0, err
	}
	time.Sleep(time.Second)
	begun := time.Now()
	err = each("pods", count, func(number int) error {
		pod := &v1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, ObjectMeta: name(number)}
		pod.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &pod.Name}}
		pod.Spec.Containers = []v1.Container{{
			Name: "main", Image: "none",
			Resources: v1.ResourceRequirements{Claims: []v1.ResourceClaim{{Name: "gpu"}}},
		}}
		return s.create(podsPath, pod)
	})
	for err == nil {
		var waiting int
		if waiting, err = s.count(podsPath + "?limit=1&fieldSelector=spec.nodeName%3D"); err == nil && waiting == 0 {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	return time.Since(begun), err
}

// The names of objects, at most as many as the path limits.
func (s *server) names(path string) ([]string, error) {
	text, err := s.send(http.MethodGet, path, "application/json", nil)
	if err != nil {
		return nil, err
	}
	var list metav1.PartialObjectMetadataList
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	var names []string
	for _, item := range list.Items {
		names = append(names, item.Name)
	}
	return names, nil
}

func (s *server) count(path string) (int, error) {
	names, err := s.names(path)
	return len(names), err
}

// Deletes at once: no kubelet stops the pods, and no controller removes the finalizers of released claims.
func (s *server) clear() error {
	if _, err := s.send(http.MethodDelete, podsPath+"?gracePeriodSeconds=0", "application/json", nil); err != nil {
		return err
	}
	names, err := s.names(claimsPath)
	if err != nil {
		return err
	}
	return each("deleted claims", len(names), func(number int) error {
		path := claimsPath + "/" + names[number]
		patch := []byte(`{"metadata":{"finalizers":null}}`)
		if _, err := s.send(http.MethodPatch, path, "application/merge-patch+json", patch); err != nil {
			return err
		}
		_, err := s.send(http.MethodDelete, path, "application/json", nil)
		return err
	})
}

func main() {
	url := flag.String("server", "", "URL of the API server")
	token := flag.String("token", "", "file with the token of an administrator")
	authority := flag.String("authority", "", "file with the certificate of the API server")
	count := flag.Int("count", 1, "number of nodes, or of claims")
	prefix := flag.String("prefix", "claim", "prefix of the names of claims and pods")
	deadline := flag.Duration("deadline", 10*time.Minute, "time limit")
	flag.Parse()
	ctx, cancel := context.WithTimeout(context.Background(), *deadline)
	defer cancel()
	s, err := connect(ctx, *url, *token, *authority)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	switch command := flag.Arg(0); {
	case command == "nodes" && flag.NArg() == 2:
		err = s.nodes(flag.Arg(1), *count)
	case command == "claims" && flag.NArg() == 2:
		var took time.Duration
		if took, err = s.claims(flag.Arg(1), *prefix, *count); err == nil {
			fmt.Printf("%.3f\n", took.Seconds())
		}
	case command == "clear" && flag.NArg() == 1:
		err = s.clear()
	default:
		fmt.Fprintln(os.Stderr, "usage: load [flags] nodes FILE | claims REQUEST | clear")
		flag.PrintDefaults()
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
