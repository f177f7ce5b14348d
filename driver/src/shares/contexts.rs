//! Measured size of a CUDA context on each GPU, in bytes.
//!
//! The library charges an estimate for each new context, and the audit replaces it with the GPU
//! driver's figure a second or two later. Until then a share may exceed its limit by the error of
//! the estimate. The size depends on GPU and driver (518 MiB on an H100 with driver 580, where
//! [`CUDA_CONTEXT_BYTES`] is 300), so policy pages use the smallest size that the agent measured.

use crate::paths::HostPaths;
use divvy_api::sharing::CUDA_CONTEXT_BYTES;
use divvy_pages::GpuUuid;
use std::fs;
use std::io;
use std::path::PathBuf;

/// Below the run directory, so that the sizes survive an update of the daemon but not a reboot, after
/// which the GPU driver may be another.
const DIRECTORY: &str = "contexts";
/// Upper bound of a stored size, in bytes. The figures depend on reports of programs, so a program that
/// hides allocations could inflate them; this bound exceeds every context that was measured, and
/// still lets small shares run.
const CONTEXT_MAX_BYTES: u64 = 2 * CUDA_CONTEXT_BYTES;

/// The stored context sizes of all GPUs.
#[derive(Clone, Debug)]
pub(crate) struct Contexts {
    dir: PathBuf,
}

impl Contexts {
    pub(crate) fn new(paths: &HostPaths) -> Self {
        Self { dir: paths.run_dir.join(DIRECTORY) }
    }

    /// The charge for a new context in a share with this memory limit, both in bytes. Shares that
    /// are too small for the measured size are charged [`CUDA_CONTEXT_BYTES`].
    pub(crate) fn of(&self, gpu: GpuUuid, limit: u64) -> u64 {
        self.stored(gpu).filter(|bytes| *bytes <= limit).unwrap_or(CUDA_CONTEXT_BYTES)
    }

    /// Stores a measured size, in bytes, if it is the first or the smallest; returns whether it was.
    pub(crate) fn record(&self, gpu: GpuUuid, bytes: u64) -> io::Result<bool> {
        let bytes = bytes.clamp(CUDA_CONTEXT_BYTES, CONTEXT_MAX_BYTES);
        if self.stored(gpu).is_some_and(|stored| stored <= bytes) {
            return Ok(false);
        }
        fs::create_dir_all(&self.dir)?;
        super::pages::create(&self.file(gpu), bytes.to_string().as_bytes(), 0o644)?;
        Ok(true)
    }

    /// The stored size; an unreadable file counts as missing and is written again.
    fn stored(&self, gpu: GpuUuid) -> Option<u64> {
        let bytes = fs::read_to_string(self.file(gpu)).ok()?.parse().ok()?;
        (CUDA_CONTEXT_BYTES..=CONTEXT_MAX_BYTES).contains(&bytes).then_some(bytes)
    }

    fn file(&self, gpu: GpuUuid) -> PathBuf {
        self.dir.join(gpu.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smallest_measured_context_is_charged() {
        let run = tempfile::tempdir().unwrap();
        let contexts = Contexts { dir: run.path().join("contexts") };
        let [gpu, other] = ["1", "2"].map(|end| {
            GpuUuid::parse(&format!("GPU-00000000-0000-0000-0000-00000000000{end}")).expect("a UUID")
        });
        let record = |mib: u64, is_new: bool, expected: u64| {
            assert_eq!(contexts.record(gpu, mib << 20).unwrap(), is_new, "{mib}");
            assert_eq!(contexts.of(gpu, 1 << 30), expected << 20, "{mib}");
        };
        assert_eq!(contexts.of(gpu, 1 << 30), CUDA_CONTEXT_BYTES);
        record(540, true, 540);
        record(600, false, 540);
        record(518, true, 518);
        assert_eq!(contexts.of(other, 1 << 30), CUDA_CONTEXT_BYTES);
        assert_eq!([517, 518].map(|limit| contexts.of(gpu, limit << 20) >> 20), [300, 518]);
        // Measurements outside the bounds are clamped.
        record(3, true, 300);
        for text in ["", "518 MiB", "99", "-1", "18446744073709551616"] {
            fs::write(contexts.file(gpu), text).unwrap();
            assert_eq!(contexts.of(gpu, 1 << 30), CUDA_CONTEXT_BYTES, "{text:?}");
        }
        record(u64::MAX >> 20, true, 600);
    }
}
