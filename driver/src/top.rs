//! What `divvy top` reads: how it stands with the shares of each GPU, written once a second.
//!
//! The agent tells it and knows claims by their UID; here they get their names. The file is in memory, as the run
//! directory is, and replaced as a whole; nobody but root reads it. Nothing is removed: a reader shows the shares that
//! still have pages, and says how old is what it shows.

use crate::paths::HostPaths;
use divvy_api::top::{DIRECTORY, GpuNow, ShareNow, VERSION};
use divvy_api::{ClaimRef, ClaimUid};
use std::collections::HashMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

/// The files, and the claims that are known.
#[derive(Debug)]
pub struct Top {
    dir: PathBuf,
    names: HashMap<ClaimUid, ClaimRef>,
}

impl Top {
    pub fn new(paths: &HostPaths) -> Self {
        Self { dir: paths.run_dir.join(DIRECTORY), names: HashMap::new() }
    }

    /// Whether the names of some of these claims are not known.
    pub fn lacks(&self, shares: &[ShareNow]) -> bool {
        shares.iter().any(|share| !self.names.contains_key(&share.claim_uid))
    }

    /// These claims are held, and no others.
    pub fn learn(&mut self, held: impl IntoIterator<Item = ClaimRef>) {
        self.names = held.into_iter().map(|claim| (claim.uid.clone(), claim)).collect();
    }

    /// Writes how it stands with a GPU, whose UUID has NVML's prefix.
    pub fn write(&self, gpu: String, mut shares: Vec<ShareNow>) -> io::Result<()> {
        for share in &mut shares {
            if let Some(claim) = self.names.get(&share.claim_uid) {
                (share.namespace, share.claim) = (Some(claim.namespace.clone()), Some(claim.name.clone()));
            }
        }
        let path = self.dir.join(format!("{gpu}.json"));
        let text = serde_json::to_vec(&GpuNow { version: VERSION, gpu, shares })?;
        let part = path.with_extension("part");
        let write = || fs::write(&part, &text);
        write().or_else(|_| {
            DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
            write()
        })?;
        fs::rename(&part, path)
    }
}
