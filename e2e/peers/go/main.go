// Runs the unmodified github.com/NVIDIA/go-nvml and go-nvlib on a simulated libnvidia-ml: every listing of a real card, the
// life cycle of MIG instances, and the call sequences of programs that use NVML on Kubernetes nodes.
//
// It prints one line per check, "ok NAME" or "FAIL NAME: REASON". The caller counts them.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// peer is a run on one simulated node.
type peer struct {
	nvml nvml.Interface
	// root is the simulator's directory, sim its command-line tool.
	root, sim string
}

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: peers ROOT DIVVY-SIM LISTINGS")
		os.Exit(2)
	}
	root, sim, listings := os.Args[1], os.Args[2], os.Args[3]
	found, err := filepath.Glob(filepath.Join(root, "usr/lib/*-linux-gnu/libnvidia-ml.so.1"))
	if err != nil || len(found) != 1 {
		fmt.Fprintf(os.Stderr, "no libnvidia-ml.so.1 under %s\n", root)
		os.Exit(2)
	}
	p := &peer{nvml: nvml.New(nvml.WithLibraryPath(found[0])), root: root, sim: sim}
	cards, err := readListings(listings)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	p.check("init", func() error { return code(p.nvml.InitWithFlags(nvml.INIT_FLAG_NO_GPUS)) })
	for _, card := range cards {
		p.checkCard(card)
	}
	p.checkConsumers(cards)
	p.check("shutdown", func() error { return code(p.nvml.Shutdown()) })
}

// check runs a check and prints the result. A panic is a failure.
func (p *peer) check(name string, body func() error) {
	defer func() {
		if panicked := recover(); panicked != nil {
			fmt.Printf("FAIL go %s: panic: %v\n", name, panicked)
		}
	}()
	if err := body(); err != nil {
		fmt.Printf("FAIL go %s: %v\n", name, err)
		return
	}
	fmt.Printf("ok go %s\n", name)
}

// command runs the simulator's command-line tool.
func (p *peer) command(arguments ...string) error {
	output, err := exec.Command(p.sim, append([]string{"--root", p.root}, arguments...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("divvy-sim %v: %w: %s", arguments, err, output)
	}
	return nil
}

// device finds the GPU of a product.
func (p *peer) device(product string) (nvml.Device, error) {
	count, ret := p.nvml.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	for index := range count {
		device, ret := p.nvml.DeviceGetHandleByIndex(index)
		if ret != nvml.SUCCESS {
			return nil, ret
		}
		if name, ret := device.GetName(); ret == nvml.SUCCESS && name == product {
			return device, nil
		}
	}
	return nil, fmt.Errorf("no %s", product)
}

func code(ret nvml.Return) error {
	if ret == nvml.SUCCESS {
		return nil
	}
	return ret
}

// want returns an error with both values if they differ.
func want(what string, got, expected any) error {
	if reflect.DeepEqual(got, expected) {
		return nil
	}
	return fmt.Errorf("%s is %v, a real card has %v", what, got, expected)
}

// first returns the first error.
func first(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
