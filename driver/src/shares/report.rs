//! Files for `divvy top`: the usage of the shares of each GPU, written once a second.
//!
//! The agent reports claims by UID; this module adds their names. The files are in memory, replaced as
//! a whole, and readable only by root. No file is removed: a reader shows only shares that still
//! have pages, and the age of the data.

use crate::paths::HostPaths;
use divvy_api::top::{DIRECTORY, GpuUsage, ShareUsage, VERSION};
use divvy_api::{ClaimRef, ClaimUid};
use std::collections::HashMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

/// Writer of the files, with the names of known claims.
#[derive(Debug)]
pub struct Top {
    dir: PathBuf,
    names: HashMap<ClaimUid, ClaimRef>,
}

impl Top {
    pub fn new(paths: &HostPaths) -> Self {
        Self { dir: paths.run_dir.join(DIRECTORY), names: HashMap::new() }
    }

    /// Whether the name of any of these claims is unknown.
    pub fn has_unknown(&self, shares: &[ShareUsage]) -> bool {
        shares.iter().any(|share| !self.names.contains_key(&share.claim_uid))
    }

    /// Replaces the known names with those of the held claims.
    pub fn set_names(&mut self, held: impl IntoIterator<Item = ClaimRef>) {
        self.names = held.into_iter().map(|claim| (claim.uid.clone(), claim)).collect();
    }

    /// Writes the usage of the shares of a GPU. Its UUID has NVML's prefix `GPU-`.
    pub fn write(&self, gpu: String, mut shares: Vec<ShareUsage>) -> io::Result<()> {
        for share in &mut shares {
            if let Some(claim) = self.names.get(&share.claim_uid) {
                (share.namespace, share.claim) = (Some(claim.namespace.clone()), Some(claim.name.clone()));
            }
        }
        let path = self.dir.join(format!("{gpu}.json"));
        let text = serde_json::to_vec(&GpuUsage { version: VERSION, gpu, shares })?;
        let part = path.with_extension("part");
        let write = || fs::write(&part, &text);
        write().or_else(|_| {
            DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
            write()
        })?;
        fs::rename(&part, path)
    }
}
