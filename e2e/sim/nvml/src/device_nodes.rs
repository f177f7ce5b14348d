//! Cache of the device nodes that this process can use, reread when their directories change.
//!
//! A directory can change twice within the resolution of its time stamp. A result that was read so
//! soon after a change is not cached.

use std::fs;
use std::path::Path;
use std::sync::{Arc, RwLock};
use std::time::{Duration, SystemTime};

use divvy_sim::visible_devices::VisibleDevices;
use divvy_sim::{Sim, State};

/// Several kernel ticks, which are the resolution of file time stamps.
const TIMESTAMP_GRANULARITY: Duration = Duration::from_millis(50);

#[derive(Default)]
pub(crate) struct DeviceNodeCache {
    /// Not waited for: a fork may leave it locked.
    cache: RwLock<Option<(Key, Arc<VisibleDevices>)>>,
}

/// Changes whenever the visible devices may have changed.
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
        let old = |changed: &SystemTime| changed.elapsed().is_ok_and(|age| age > TIMESTAMP_GRANULARITY);
        self.changed.iter().flatten().all(old)
    }
}

impl DeviceNodeCache {
    pub(crate) fn read(&self, sim: &Sim, state: &State) -> Arc<VisibleDevices> {
        let key = Key::read(&sim.dev(), state);
        if let Ok(cache) = self.cache.try_read()
            && let Some((known, visible)) = &*cache
            && *known == key
        {
            return Arc::clone(visible);
        }
        let visible = Arc::new(sim.visible_devices());
        if key.settled()
            && let Ok(mut cache) = self.cache.try_write()
        {
            *cache = Some((key, Arc::clone(&visible)));
        }
        visible
    }
}
