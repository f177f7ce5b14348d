//! Field values: numbers by id, several in one call, each with its own result.
//!
//! The ids are those of header 13.3. As in the real library, a field that is not simulated has the
//! result NOT_SUPPORTED, while the call itself succeeds.

use std::time::{SystemTime, UNIX_EPOCH};

use divvy_sim::catalogue::{Architecture, Toggle};
use divvy_sim::code::Code;

use crate::abi::FieldValue;
use crate::argument::{Array, Outcome};
use crate::clocks;
use crate::handle::{Device, Target};
use crate::library::{Nvml, entry};

/// A value with its `nvmlValueType_t`.
enum Value {
    Word(u32),
    Long(u64),
}

/// Values of the simulated `NVML_FI_DEV_*` fields.
fn read(nvml: &Nvml, target: &Target<'_>, field: u32) -> Outcome<Value> {
    let (gpu, model) = (target.gpu, target.gpu.model());
    let health = &gpu.health;
    let remaps = || if model.architecture >= Architecture::Ampere { Ok(()) } else { Err(Code::NotSupported) };
    if target.mig.is_some() {
        return Err(Code::NotSupported);
    }
    let value = match field {
        // ECC mode, current and pending.
        1 | 2 => Value::Word(1),
        // Totals: single bit and double bit, volatile and aggregate.
        3 => Value::Long(health.ecc_corrected),
        4 => Value::Long(health.ecc_uncorrected),
        5 => Value::Long(health.ecc_corrected_total),
        6 => Value::Long(health.ecc_uncorrected_total),
        // Memory temperature.
        82 => Value::Word(clocks::temperature(gpu) + 4),
        // Energy since the driver was loaded, in mJ.
        83 | 191 => Value::Long(clocks::energy(nvml, target.slot)?),
        // Number of NVLinks, and their common speed.
        91 => Value::Word(if gpu.mig.current { 0 } else { model.nvlink_links }),
        90 | 164 if model.nvlink_links > 0 => Value::Word(model.nvlink_mib_per_second),
        // PCIe replays, and rollovers of that counter.
        94 | 95 => Value::Word(0),
        // Remapped rows: correctable, uncorrectable, pending, failed.
        142 => remaps().map(|()| Value::Word(health.rows_remapped_corrected))?,
        143 => remaps().map(|()| Value::Word(health.rows_remapped_uncorrected))?,
        144 => remaps().map(|()| Value::Word(health.remap_pending.into()))?,
        145 => remaps().map(|()| Value::Word(health.remap_failed.into()))?,
        // MIG mode change without a reset; MIG profiles listed while the mode is off.
        184 => Value::Word(model.mig.as_ref().is_some_and(|mig| mig.toggle == Toggle::Live).into()),
        199 => Value::Word(model.mig.is_some().into()),
        // Power: average and current; limits: minimum, maximum, default, current, requested.
        185 | 186 => Value::Word(clocks::power_mw(gpu)),
        187 => Value::Word(model.power_watts * 500),
        188..=190 | 192 => Value::Word(model.power_watts * 1000),
        230 => Value::Word(health.recovery_action),
        _ => return Err(Code::NotSupported),
    };
    Ok(value)
}

entry! {
    fn nvmlDeviceGetFieldValues(nvml, device: Device, count: i32, values: Array<FieldValue>) {
        let target = device.target(nvml.state_with_gpu_processes()?)?;
        let count = usize::try_from(count).ok().filter(|count| *count > 0).ok_or(Code::InvalidArgument)?;
        if values.is_null() {
            return Err(Code::InvalidArgument);
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_micros() as i64);
        for at in 0..count {
            let place = values.at(at);
            let asked = place.get();
            let (result, value_type, value) = match read(nvml, &target, asked.field) {
                Ok(Value::Word(word)) => (Code::Success, 1, u64::from(word)),
                Ok(Value::Long(long)) => (Code::Success, 3, long),
                Err(code) => (code, 0, 0),
            };
            place.set(FieldValue {
                timestamp: now,
                latency_us: 0,
                value_type,
                result: result.into(),
                value: value.to_le_bytes(),
                ..asked
            });
        }
        Ok(())
    }

    fn nvmlDeviceClearFieldValues(nvml, device: Device, count: i32, values: Array<FieldValue>) {
        device.whole(&nvml.state)?;
        let count = usize::try_from(count).ok().filter(|count| *count > 0).ok_or(Code::InvalidArgument)?;
        if values.is_null() {
            return Err(Code::InvalidArgument);
        }
        for at in 0..count {
            let place = values.at(at);
            place.set(FieldValue { result: Code::NotSupported.into(), ..place.get() });
        }
        Ok(())
    }
}
