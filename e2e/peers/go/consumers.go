package main

import (
	"fmt"
	"strings"

	"github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// checkConsumers replays the call sequences of programs on a Kubernetes node.
func (p *peer) checkConsumers(cards []card) {
	for _, card := range cards {
		gpu, err := p.device(card.Product)
		if err != nil {
			p.check(card.Model, func() error { return err })
			continue
		}
		name := func(what string) string { return card.Model + " " + what }
		p.check(name("as the DRA driver enumerates"), func() error { return p.draEnumerate(gpu, card) })
		p.check(name("as the DRA driver creates and deletes"), func() error { return p.draLifeCycle(gpu, card) })
		p.check(name("as mig-parted applies"), func() error { return migPartedApply(gpu, card) })
		p.check(name("as the device plugin enumerates"), func() error { return p.devicePlugin(gpu, card) })
		p.check(name("as go-nvlib sees it"), func() error { return p.goNvlib(gpu, card) })
	}
	p.check("events of the device plugin", p.devicePluginEvents)
	p.check("go-nvlib profiles of the node", func() error {
		profiles, err := device.New(p.nvml).GetMigProfiles()
		if err != nil {
			return err
		}
		known := map[string]bool{}
		for _, profile := range profiles {
			known[profile.String()] = true
		}
		for _, card := range cards {
			for _, profile := range card.Profiles {
				if !known[profile.Name] {
					return fmt.Errorf("no %s of %s", profile.Name, card.Model)
				}
			}
		}
		return nil
	})
}

// draEnumerate: the calls of NVIDIA's DRA driver for each GPU at its start.
func (p *peer) draEnumerate(gpu nvml.Device, card card) error {
	uuid, ret := gpu.GetUUID()
	if ret != nvml.SUCCESS {
		return ret
	}
	if !strings.HasPrefix(uuid, "GPU-") || len(uuid) != len("GPU-00000000-0000-0000-0000-000000000000") {
		return fmt.Errorf("UUID %q", uuid)
	}
	for _, query := range []func() nvml.Return{
		func() nvml.Return { _, ret := gpu.GetMinorNumber(); return ret },
		func() nvml.Return { _, _, ret := gpu.GetMigMode(); return ret },
		func() nvml.Return { _, ret := gpu.GetMemoryInfo(); return ret },
		func() nvml.Return { _, ret := gpu.GetArchitecture(); return ret },
		func() nvml.Return { _, ret := gpu.GetBrand(); return ret },
		func() nvml.Return { _, _, ret := gpu.GetCudaComputeCapability(); return ret },
		func() nvml.Return { _, ret := p.nvml.SystemGetDriverVersion(); return ret },
		func() nvml.Return { _, ret := p.nvml.SystemGetCudaDriverVersion_v2(); return ret },
		func() nvml.Return { _, ret := gpu.GetPciInfo(); return ret },
		func() nvml.Return { _, ret := gpu.GetAddressingMode(); return ret },
		func() nvml.Return { _, ret := gpu.GetModuleId(); return ret },
		func() nvml.Return { _, ret := gpu.GetPersistenceMode(); return ret },
		func() nvml.Return { _, ret := gpu.GetVirtualizationMode(); return ret },
	} {
		if ret := query(); ret != nvml.SUCCESS {
			return ret
		}
	}
	// A card outside a fabric reports no fabric.
	if _, ret := gpu.GetGpuFabricInfoV().V2(); ret != nvml.SUCCESS && ret != nvml.ERROR_NOT_SUPPORTED {
		return ret
	}
	for index := range nvml.GPU_INSTANCE_PROFILE_COUNT {
		info, ret := gpu.GetGpuInstanceProfileInfo(index)
		if ret == nvml.ERROR_NOT_SUPPORTED || ret == nvml.ERROR_INVALID_ARGUMENT {
			continue
		}
		if ret != nvml.SUCCESS {
			return ret
		}
		if _, ret := gpu.GetGpuInstancePossiblePlacements(&info); ret != nvml.SUCCESS {
			return ret
		}
	}
	return nil
}

// draLifeCycle: prepare and unprepare of a dynamic MIG device by NVIDIA's DRA driver.
func (p *peer) draLifeCycle(gpu nvml.Device, card card) error {
	uuid, ret := gpu.GetUUID()
	if ret != nvml.SUCCESS {
		return ret
	}
	parent, ret := p.nvml.DeviceGetHandleByUUID(uuid)
	if ret != nvml.SUCCESS {
		return ret
	}
	if err := setMode(parent, nvml.DEVICE_MIG_ENABLE); err != nil {
		return err
	}
	info, ret := parent.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_1_SLICE)
	if ret != nvml.SUCCESS {
		return ret
	}
	place := nvml.GpuInstancePlacement{Start: 0, Size: card.Profiles[0].Size}
	gi, ret := parent.CreateGpuInstanceWithPlacement(&info, &place)
	if ret != nvml.SUCCESS {
		return ret
	}
	giInfo, ret := gi.GetInfo()
	if ret != nvml.SUCCESS {
		return ret
	}
	ciProfile, ret := gi.GetComputeInstanceProfileInfo(
		nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
	if ret != nvml.SUCCESS {
		return ret
	}
	ci, ret := gi.CreateComputeInstance(&ciProfile)
	if ret != nvml.SUCCESS {
		return ret
	}
	ciInfo, ret := ci.GetInfo()
	if ret != nvml.SUCCESS {
		return ret
	}
	migUUID, ret := ciInfo.Device.GetUUID()
	if ret != nvml.SUCCESS {
		return ret
	}
	if !strings.HasPrefix(migUUID, "MIG-") {
		return fmt.Errorf("UUID of the compute instance's device is %s", migUUID)
	}
	// Looks up everything again by id.
	found, ret := parent.GetGpuInstanceById(int(giInfo.Id))
	if ret != nvml.SUCCESS {
		return ret
	}
	part, ret := found.GetComputeInstanceById(int(ciInfo.Id))
	if ret != nvml.SUCCESS {
		return ret
	}
	if err := first(code(part.Destroy()), code(found.Destroy())); err != nil {
		return err
	}
	if _, ret := parent.GetGpuInstanceById(int(giInfo.Id)); ret != nvml.ERROR_NOT_FOUND {
		return fmt.Errorf("the destroyed instance: %v", ret)
	}
	if ret := gi.Destroy(); ret == nvml.SUCCESS {
		return fmt.Errorf("a stale handle destroyed something")
	}
	most, ret := parent.GetMaxMigDeviceCount()
	if ret != nvml.SUCCESS {
		return ret
	}
	for index := range most {
		if _, ret := parent.GetMigDeviceHandleByIndex(index); ret != nvml.ERROR_NOT_FOUND {
			return fmt.Errorf("MIG device %d after all are gone: %v", index, ret)
		}
	}
	return setMode(parent, nvml.DEVICE_MIG_DISABLE)
}

// migPartedApply: clears the GPU, creates one-slice instances, exports the configuration and clears the GPU again.
func migPartedApply(gpu nvml.Device, card card) error {
	if err := setMode(gpu, nvml.DEVICE_MIG_ENABLE); err != nil {
		return err
	}
	small := card.Profiles[0]
	info, ret := gpu.GetGpuInstanceProfileInfo(small.Index)
	if ret != nvml.SUCCESS {
		return ret
	}
	for range info.InstanceCount {
		gi, ret := gpu.CreateGpuInstance(&info)
		if ret != nvml.SUCCESS {
			return ret
		}
		if _, err := wholeComputeInstance(gi, info.SliceCount); err != nil {
			return err
		}
	}
	if _, ret := gpu.CreateGpuInstance(&info); ret != nvml.ERROR_INSUFFICIENT_RESOURCES {
		return fmt.Errorf("one more than fits: %v", ret)
	}
	gis, cis, err := walk(gpu)
	if err != nil {
		return err
	}
	if err := want("instances", [2]int{len(gis), len(cis)}, [2]int{int(info.InstanceCount), int(info.InstanceCount)}); err != nil {
		return err
	}
	for _, ci := range cis {
		if ret := ci.Destroy(); ret != nvml.SUCCESS {
			return ret
		}
	}
	for _, gi := range gis {
		if ret := gi.Destroy(); ret != nvml.SUCCESS {
			return ret
		}
	}
	return setMode(gpu, nvml.DEVICE_MIG_DISABLE)
}

// walk finds all instances, profile by profile.
func walk(gpu nvml.Device) ([]nvml.GpuInstance, []nvml.ComputeInstance, error) {
	var gis []nvml.GpuInstance
	var cis []nvml.ComputeInstance
	for index := range nvml.GPU_INSTANCE_PROFILE_COUNT {
		info, ret := gpu.GetGpuInstanceProfileInfo(index)
		if ret != nvml.SUCCESS {
			continue
		}
		found, ret := gpu.GetGpuInstances(&info)
		if ret != nvml.SUCCESS {
			return nil, nil, ret
		}
		for _, gi := range found {
			gis = append(gis, gi)
			for ciIndex := range nvml.COMPUTE_INSTANCE_PROFILE_COUNT {
				ciInfo, ret := gi.GetComputeInstanceProfileInfo(ciIndex, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
				if ret != nvml.SUCCESS {
					continue
				}
				parts, ret := gi.GetComputeInstances(&ciInfo)
				if ret != nvml.SUCCESS {
					return nil, nil, ret
				}
				cis = append(cis, parts...)
			}
		}
	}
	return gis, cis, nil
}

// devicePlugin: MIG devices by index, with the attributes that the plugin and feature discovery read.
func (p *peer) devicePlugin(gpu nvml.Device, card card) error {
	return withInstance(gpu, card, func() error {
		most, ret := gpu.GetMaxMigDeviceCount()
		if ret != nvml.SUCCESS {
			return ret
		}
		seen := 0
		for index := range most {
			mig, ret := gpu.GetMigDeviceHandleByIndex(index)
			if ret == nvml.ERROR_NOT_FOUND || ret == nvml.ERROR_INVALID_ARGUMENT {
				continue
			}
			if ret != nvml.SUCCESS {
				return ret
			}
			seen++
			attributes, ret := mig.GetAttributes()
			if ret != nvml.SUCCESS {
				return ret
			}
			parent, ret := mig.GetDeviceHandleFromMigDeviceHandle()
			if ret != nvml.SUCCESS {
				return ret
			}
			uuid, _ := gpu.GetUUID()
			parentUUID, ret := parent.GetUUID()
			gi, giRet := mig.GetGpuInstanceId()
			ci, ciRet := mig.GetComputeInstanceId()
			memory, memoryRet := mig.GetMemoryInfo()
			if err := first(
				code(ret), code(giRet), code(ciRet), code(memoryRet),
				want("parent", parentUUID, uuid),
				want("GPU instance", uint32(gi), card.GiIDs[fmt.Sprintf("0:%d", card.Profiles[0].Size)]),
				want("compute instance", ci, 0),
				want("SMs", attributes.MultiprocessorCount, card.Profiles[0].SM),
				want("memory", memory.Total>>20, card.Profiles[0].MemoryMiB),
			); err != nil {
				return err
			}
		}
		return want("MIG devices", seen, 1)
	})
}

// goNvlib: the common library of the device plugin, the DRA driver and the container toolkit.
func (p *peer) goNvlib(gpu nvml.Device, card card) error {
	return withInstance(gpu, card, func() error {
		lib := device.New(p.nvml)
		seen := []string{}
		err := lib.VisitMigDevices(func(_ int, _ device.Device, _ int, mig device.MigDevice) error {
			profile, err := mig.GetProfile()
			if err != nil {
				return err
			}
			seen = append(seen, profile.String())
			return nil
		})
		if err != nil {
			return err
		}
		wrapped, err := lib.NewDevice(gpu)
		if err != nil {
			return err
		}
		capable, err := wrapped.IsMigCapable()
		if err != nil {
			return err
		}
		enabled, err := wrapped.IsMigEnabled()
		if err != nil {
			return err
		}
		for _, query := range []func() (string, error){
			wrapped.GetArchitectureAsString, wrapped.GetBrandAsString, wrapped.GetCudaComputeCapabilityAsString,
			wrapped.GetAddressingModeAsString, wrapped.GetPCIBusID,
		} {
			if _, err := query(); err != nil {
				return err
			}
		}
		if _, err := wrapped.IsFabricAttached(); err != nil {
			return err
		}
		if _, err := wrapped.IsCoherent(); err != nil {
			return err
		}
		return first(
			want("MIG devices", seen, []string{card.Profiles[0].Name}),
			want("capable and enabled", [2]bool{capable, enabled}, [2]bool{true, true}),
		)
	})
}

// withInstance runs body while the GPU has an instance of its smallest profile at the first placement.
func withInstance(gpu nvml.Device, card card, body func() error) error {
	if err := setMode(gpu, nvml.DEVICE_MIG_ENABLE); err != nil {
		return err
	}
	info, ret := gpu.GetGpuInstanceProfileInfo(card.Profiles[0].Index)
	if ret != nvml.SUCCESS {
		return ret
	}
	gi, ret := gpu.CreateGpuInstanceWithPlacement(&info, &nvml.GpuInstancePlacement{Size: card.Profiles[0].Size})
	if ret != nvml.SUCCESS {
		return ret
	}
	ci, err := wholeComputeInstance(gi, info.SliceCount)
	if err != nil {
		return err
	}
	err = body()
	return first(err, code(ci.Destroy()), code(gi.Destroy()), setMode(gpu, nvml.DEVICE_MIG_DISABLE))
}

// devicePluginEvents: registers for events of all parents, and receives an XID.
func (p *peer) devicePluginEvents() error {
	set, ret := p.nvml.EventSetCreate()
	if ret != nvml.SUCCESS {
		return ret
	}
	defer set.Free()
	count, ret := p.nvml.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return ret
	}
	mask := uint64(nvml.EventTypeXidCriticalError | nvml.EventTypeDoubleBitEccError | nvml.EventTypeSingleBitEccError)
	for index := range count {
		gpu, ret := p.nvml.DeviceGetHandleByIndex(index)
		if ret != nvml.SUCCESS {
			return ret
		}
		supported, ret := gpu.GetSupportedEventTypes()
		if ret != nvml.SUCCESS {
			return ret
		}
		if ret := gpu.RegisterEvents(mask&supported, set); ret != nvml.SUCCESS {
			return ret
		}
	}
	if _, ret := set.Wait(0); ret != nvml.ERROR_TIMEOUT {
		return fmt.Errorf("waiting for nothing: %v", ret)
	}
	if err := p.command("xid", "1", "79"); err != nil {
		return err
	}
	event, ret := set.Wait(5000)
	if ret != nvml.SUCCESS {
		return ret
	}
	index, ret := event.Device.GetIndex()
	return first(
		code(ret),
		want("GPU of the event", index, 1),
		want("XID", event.EventData, uint64(79)),
		want("instance", [2]uint32{event.GpuInstanceId, event.ComputeInstanceId}, [2]uint32{0xFFFFFFFF, 0xFFFFFFFF}),
	)
}
