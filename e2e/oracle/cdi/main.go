// Computes the mounts of a container from several CDI files, with the library of the container runtimes:
// tags.cncf.io/container-device-interface.
//
// Standard input is a list of containers, each with files by name and its devices in order. Standard output has the mounts
// of each.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
)

type container struct {
	Files   map[string]json.RawMessage `json:"files"`
	Devices []string                   `json:"devices"`
}

func mounts(of container) ([]oci.Mount, error) {
	dir, err := os.MkdirTemp("", "cdi-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	for name, text := range of.Files {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
			return nil, err
		}
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir), cdi.WithAutoRefresh(false))
	if err != nil {
		return nil, err
	}
	// Only the mounts are returned, because device nodes depend on the machine.
	spec := &oci.Spec{}
	_, err = cache.InjectDevices(spec, of.Devices...)
	return spec.Mounts, err
}

func run() error {
	var containers []container
	if err := json.NewDecoder(os.Stdin).Decode(&containers); err != nil {
		return err
	}
	answers := make([][]oci.Mount, len(containers))
	for i, of := range containers {
		var err error
		if answers[i], err = mounts(of); err != nil {
			return fmt.Errorf("container %d: %w", i, err)
		}
	}
	return json.NewEncoder(os.Stdout).Encode(answers)
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
