//! The device nodes this process may use, read again when their directories change.
//!
//! A directory that changed within the clock's resolution of being read may change again without a new time stamp, so
//! what is read so soon is not kept.

use std::fs;
use std::path::Path;
use std::sync::{Arc, RwLock};
use std::time::{Duration, SystemTime};

use divvy_sim::visible::Visible;
use divvy_sim::{Sim, State};

/// Time stamps of files are no finer than the kernel's tick; this is several.
const TICKS: Duration = Duration::from_millis(50);

#[derive(Default)]
pub(crate) struct Nodes {
    /// Tried, not waited for: a fork may leave it locked.
    cache: RwLock<Option<(Key, Arc<Visible>)>>,
}

/// Changes whenever what is visible may have changed.
#[derive(Clone, PartialEq, Eq)]
struct Key {
    generation: u64,
    changed: [Option<SystemTime>; 2],
}

impl Key {
    fn read(dev: &Path, state: &State) -> Self {
        let changed = |dir: &Path| fs::metadata(dir).and_then(|meta| meta.modified()).ok();
        Self { generation: state.generation, changed: [changed(dev), changed(&dev.join("nvidia-caps"))] }
    }

    fn settled(&self) -> bool {
        let old = |changed: &SystemTime| changed.elapsed().is_ok_and(|age| age > TICKS);
        self.changed.iter().flatten().all(old)
    }
}

impl Nodes {
    pub(crate) fn read(&self, sim: &Sim, state: &State) -> Arc<Visible> {
        let key = Key::read(&sim.dev(), state);
        if let Ok(cache) = self.cache.try_read()
            && let Some((known, visible)) = &*cache
            && *known == key
        {
            return Arc::clone(visible);
        }
        let visible = Arc::new(sim.visible());
        if key.settled()
            && let Ok(mut cache) = self.cache.try_write()
        {
            *cache = Some((key, Arc::clone(&visible)));
        }
        visible
    }
}
