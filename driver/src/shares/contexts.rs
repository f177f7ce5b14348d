//! What a context takes of each GPU's memory, as far as this node has seen.
//!
//! The library charges an estimate when a context is opened, and the audit puts the GPU driver's figure in its place a second or two
//! later; until then the share stands beyond its limit by what the estimate lacks. That differs by GPU and driver (518 MiB on an H100
//! with driver 580, where [`CONTEXT`] is 300), so the least that the agent saw one take is what policy pages say from
//! then on: the least, as programs load modules on top. A table of GPUs lost to that: it would be wrong with the next driver.
//!
//! In the run directory, so that an update of the daemon keeps it and a reboot, after which the driver may be another, does
//! not. What programs say of their allocations is in it, so no word of theirs takes it out of [`CONTEXT`] to [`MOST`], and a share that is too
//! small for it is charged [`CONTEXT`] as before: else one that hides what it allocates could keep small ones from the GPU.

use crate::paths::HostPaths;
use divvy_api::sharing::CONTEXT;
use divvy_pages::GpuUuid;
use std::fs;
use std::io;
use std::path::PathBuf;

/// Of the run directory.
const DIRECTORY: &str = "contexts";
/// In bytes: more than any context that was measured so far, and little enough to be a loss that small shares bear.
const MOST: u64 = 2 * CONTEXT;

/// What is known of all GPUs.
#[derive(Clone, Debug)]
pub(crate) struct Contexts {
    dir: PathBuf,
}

impl Contexts {
    pub(crate) fn new(paths: &HostPaths) -> Self {
        Self { dir: paths.run_dir.join(DIRECTORY) }
    }

    /// What a context of a share with that limit is to be charged until it is measured, both in bytes.
    pub(crate) fn of(&self, gpu: GpuUuid, limit: u64) -> u64 {
        self.known(gpu).filter(|bytes| *bytes <= limit).unwrap_or(CONTEXT)
    }

    /// One took so many bytes; says whether that is less than was known, or the first that is.
    pub(crate) fn saw(&self, gpu: GpuUuid, bytes: u64) -> io::Result<bool> {
        let bytes = bytes.clamp(CONTEXT, MOST);
        if self.known(gpu).is_some_and(|known| known <= bytes) {
            return Ok(false);
        }
        fs::create_dir_all(&self.dir)?;
        super::create(&self.file(gpu), bytes.to_string().as_bytes(), 0o644)?;
        Ok(true)
    }

    /// Nothing where there is no number: it is found again.
    fn known(&self, gpu: GpuUuid) -> Option<u64> {
        let bytes = fs::read_to_string(self.file(gpu)).ok()?.parse().ok()?;
        (CONTEXT..=MOST).contains(&bytes).then_some(bytes)
    }

    fn file(&self, gpu: GpuUuid) -> PathBuf {
        self.dir.join(gpu.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_that_was_seen_of_a_gpu_is_what_its_contexts_are_charged() {
        let run = tempfile::tempdir().unwrap();
        let contexts = Contexts { dir: run.path().join("contexts") };
        let [gpu, other] = ["1", "2"].map(|end| {
            GpuUuid::parse(&format!("GPU-00000000-0000-0000-0000-00000000000{end}")).expect("a UUID")
        });
        let saw = |mib: u64, is_new: bool, expected: u64| {
            assert_eq!(contexts.saw(gpu, mib << 20).unwrap(), is_new, "{mib}");
            assert_eq!(contexts.of(gpu, 1 << 30), expected << 20, "{mib}");
        };
        assert_eq!(contexts.of(gpu, 1 << 30), CONTEXT);
        saw(540, true, 540);
        saw(600, false, 540);
        saw(518, true, 518);
        assert_eq!(contexts.of(other, 1 << 30), CONTEXT);
        assert_eq!([517, 518].map(|limit| contexts.of(gpu, limit << 20) >> 20), [300, 518]);
        // What somebody claims is no less than any GPU's, and no more.
        saw(3, true, 300);
        for text in ["", "518 MiB", "99", "-1", "18446744073709551616"] {
            fs::write(contexts.file(gpu), text).unwrap();
            assert_eq!(contexts.of(gpu, 1 << 30), CONTEXT, "{text:?}");
        }
        saw(u64::MAX >> 20, true, 600);
    }
}
