//! The floor under a prepare: what no driver can avoid, measured in the same rounds.

use crate::stats::{median, micros};
use crate::world::World;
use anyhow::{Context, Result};
use divvy_kubelet::dra::v1::Claim as WireClaim;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What no driver can avoid: reading the claim, being called, writing three files.
#[derive(Default)]
pub(crate) struct Floor {
    gets: Vec<f64>,
    calls: Vec<f64>,
    files: Vec<f64>,
}

impl Floor {
    pub(crate) async fn sample(&mut self, world: &World, claim: &WireClaim, sizes: &Sizes) -> Result<()> {
        self.gets.push(micros(world.get(claim).await?));
        self.calls.push(micros(world.prepare(&[]).await?));
        self.files.push(micros(sizes.write()?));
        Ok(())
    }

    /// p50 of a GET and p50 of an empty call, added.
    pub(crate) fn call(&self) -> f64 {
        median(&self.gets) + median(&self.calls)
    }

    /// p50 of three temp-file-and-rename writes.
    pub(crate) fn files(&self) -> f64 {
        median(&self.files)
    }

    pub(crate) fn whole(&self) -> f64 {
        self.call() + self.files()
    }
}

/// The files of one prepare: two versions of the record, one CDI file.
pub(crate) struct Sizes {
    record: File,
    spec: File,
}

struct File {
    dir: PathBuf,
    bytes: Vec<u8>,
}

impl File {
    /// As large as that claim's file in the directory or below it, and beside it.
    fn of(dir: &Path, claim: &WireClaim) -> Result<Self> {
        let named =
            |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().contains(&claim.uid));
        let file = walk(dir).into_iter().find(named);
        let file =
            file.with_context(|| format!("no file of claim {} below {}", claim.name, dir.display()))?;
        let bytes = vec![b'x'; usize::try_from(std::fs::metadata(&file)?.len())?];
        Ok(Self { dir: file.parent().context("no parent")?.to_owned(), bytes })
    }

    // The driver and the runtime look at .json files only.
    fn path(&self) -> PathBuf {
        self.dir.join("floor")
    }

    fn put(&self) -> std::io::Result<()> {
        let part = self.dir.join("floor.part");
        std::fs::write(&part, &self.bytes)?;
        std::fs::rename(part, self.path())
    }
}

impl Sizes {
    /// Reads the sizes of a claim that is prepared now.
    pub(crate) fn of(world: &World, claim: &WireClaim) -> Result<Self> {
        Ok(Self { record: File::of(&world.state, claim)?, spec: File::of(&world.cdi, claim)? })
    }

    fn write(&self) -> Result<Duration> {
        let began = Instant::now();
        self.record.put()?;
        self.spec.put()?;
        self.record.put()?;
        let took = began.elapsed();
        std::fs::remove_file(self.record.path())?;
        std::fs::remove_file(self.spec.path())?;
        Ok(took)
    }
}

fn walk(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() { files.extend(walk(&path)) } else { files.push(path) }
    }
    files
}
