//! Device metadata files (KEP-5304): attributes of a claim's devices that programs in the container
//! can read at a path that is the same for every driver.
//!
//! The files are on disk, because after a reboot a pod starts only if its mounts exist. A share has
//! the additional attributes `shareID` and `shareMemory`. A file that cannot be written is logged
//! and left out, as in the Go helper: only programs that ask for it depend on it.

use super::document::Mount;
use divvy_api::names::DRIVER;
use divvy_api::{AllocatedClaim, AllocatedDevice, ClaimRef, ClaimUid, Quantity, RequestName};
use divvy_model::{DeviceId, Inventory, share};
use k8s_openapi::api::resource::v1::DeviceAttribute;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// Directory in the container (KEP-5304).
const CONTAINER: &str = "/var/run/kubernetes.io/dra-device-attributes";
/// Versions of the object in a file, newest first, one after the other.
const VERSIONS: [&str; 2] = ["metadata.resource.k8s.io/v1beta1", "metadata.resource.k8s.io/v1alpha1"];
/// Below the state directory: one directory for each claim, named by its UID.
pub const DIRECTORY: &str = "metadata";
/// Ends the names of files; that of a temporary file differs.
const EXTENSION: &str = ".json";
const MOUNT_OPTIONS: &[&str] = &["ro", "nosuid", "nodev", "noexec", "bind"];

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DeviceMetadata<'a> {
    api_version: &'a str,
    kind: &'a str,
    metadata: ObjectMeta<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod_claim_name: Option<&'a str>,
    requests: Vec<Request<'a>>,
}

#[derive(Serialize)]
struct ObjectMeta<'a> {
    name: &'a str,
    namespace: &'a str,
    uid: &'a str,
    generation: i64,
}

#[derive(Serialize)]
struct Request<'a> {
    name: &'a str,
    devices: Vec<Device<'a>>,
}

#[derive(Serialize)]
struct Device<'a> {
    driver: &'a str,
    pool: &'a str,
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    attributes: Option<BTreeMap<String, DeviceAttribute>>,
}

/// Writes the files of a claim, one for each request: `<state>/metadata/<claim UID>/<request>.json`.
/// The objects in a file tell where it is in the container, so the mounts of a claim can be derived from
/// its files at any time.
pub(super) fn write(dir: &Path, claim: &AllocatedClaim, inventory: &Inventory) -> io::Result<()> {
    let dir = dir.join(claim.claim.uid.as_str());
    std::fs::create_dir_all(&dir)?;
    for request in requests(claim) {
        let file = dir.join(format!("{request}{EXTENSION}"));
        super::claim_file::replace(&file, &content(claim, request, inventory)?)?;
    }
    Ok(())
}

/// The requests of a claim without duplicates, in the order of the allocation.
fn requests(claim: &AllocatedClaim) -> Vec<&RequestName> {
    let mut requests: Vec<&RequestName> = Vec::new();
    for device in &claim.devices {
        if !requests.contains(&&device.request) {
            requests.push(&device.request);
        }
    }
    requests
}

fn content(claim: &AllocatedClaim, request: &RequestName, inventory: &Inventory) -> io::Result<Vec<u8>> {
    let mut by_name: Vec<Request<'_>> = Vec::new();
    for allocated in claim.devices.iter().filter(|device| device.request == *request) {
        let AllocatedDevice { chosen, pool, device, .. } = allocated;
        let attributes = divvy_slices::attributes(inventory, device).map(|mut attributes| {
            attributes.extend(share_attributes(allocated, inventory));
            attributes
        });
        let entry = Device { driver: DRIVER, pool: pool.as_str(), name: device.as_str(), attributes };
        match by_name.iter_mut().find(|have| have.name == chosen) {
            Some(have) => have.devices.push(entry),
            None => by_name.push(Request { name: chosen, devices: vec![entry] }),
        }
    }
    let mut object = DeviceMetadata {
        api_version: VERSIONS[0],
        kind: "DeviceMetadata",
        metadata: ObjectMeta {
            name: &claim.claim.name,
            namespace: &claim.claim.namespace,
            uid: claim.claim.uid.as_str(),
            generation: 1,
        },
        pod_claim_name: claim.pod_claim.as_deref(),
        requests: by_name,
    };
    let mut stream = Vec::new();
    for version in VERSIONS {
        object.api_version = version;
        serde_json::to_writer_pretty(&mut stream, &object)?;
        stream.push(b'\n');
    }
    Ok(stream)
}

/// The additional attributes of a share; empty for other devices.
fn share_attributes(device: &AllocatedDevice, inventory: &Inventory) -> Vec<(String, DeviceAttribute)> {
    let share = || {
        let id = DeviceId::try_from(&device.device).ok().filter(|id| id.mode().may_hold_shares())?;
        let (gpu, instance) = id.resolve(inventory).ok()?;
        share::share(&device.hold, share::memory(gpu, instance)).ok()?
    };
    let string = |name: &str, text: String| {
        (name.to_owned(), DeviceAttribute { string: Some(text), ..DeviceAttribute::default() })
    };
    share().map_or_else(Vec::new, |share| {
        let memory = Quantity::bytes(share.memory).to_string();
        vec![string("shareID", share.id.to_string()), string("shareMemory", memory)]
    })
}

/// The mounts of a claim's files, by request. A file that cannot be read is left out.
pub(super) fn mounts(dir: &Path, claim: &ClaimUid) -> BTreeMap<String, Mount> {
    let mount = |(request, file): (String, PathBuf)| {
        let Described { metadata, pod_claim_name } = described(&file)?;
        let (owner, name) = match pod_claim_name {
            Some(name) => ("resourceclaimtemplates", name),
            None => ("resourceclaims", metadata.name),
        };
        let container_path = format!("{CONTAINER}/{owner}/{name}/{request}/{DRIVER}-metadata.json");
        let host_path = file.display().to_string();
        Some((request, Mount { host_path, container_path, options: MOUNT_OPTIONS }))
    };
    files(dir, claim).into_iter().filter_map(mount).collect()
}

/// The files of a claim, with the request of each.
fn files(dir: &Path, claim: &ClaimUid) -> Vec<(String, PathBuf)> {
    let mut files = Vec::new();
    for entry in entries(&dir.join(claim.as_str())) {
        let name = entry.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        match name.strip_suffix(EXTENSION) {
            Some(request) => files.push((request.to_owned(), entry)),
            None => files.extend(nested_files(&entry)),
        }
    }
    files
}

/// The files of a claim that an earlier version prepared: `<owner>/<request>/metadata.json`.
fn nested_files(kind: &Path) -> impl Iterator<Item = (String, PathBuf)> {
    let requests = entries(kind).flat_map(|owner| entries(&owner));
    requests.filter_map(|request| {
        let file = request.join("metadata.json");
        Some((request.file_name()?.to_string_lossy().into_owned(), file))
    })
}

fn entries(dir: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path())
}

/// The parts of the object in a file that identify its claim.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Described {
    metadata: Owner,
    pod_claim_name: Option<String>,
}

#[derive(Deserialize)]
struct Owner {
    name: String,
    namespace: String,
    uid: ClaimUid,
}

/// The first object of a file. `None` if it cannot be read.
fn described(file: &Path) -> Option<Described> {
    let bytes = std::fs::read(file).ok()?;
    serde_json::Deserializer::from_slice(&bytes).into_iter().next()?.ok()
}

/// The claim that the files describe; `None` if there is none that can be read.
pub(super) fn claim_ref(dir: &Path, claim: &ClaimUid) -> Option<ClaimRef> {
    let found = files(dir, claim).iter().find_map(|(_, file)| described(file))?;
    let Owner { name, namespace, uid } = found.metadata;
    (uid == *claim).then_some(ClaimRef { namespace, name, uid })
}

/// Removes the files of a claim; succeeds if there are none.
pub(super) fn remove(dir: &Path, claim: &ClaimUid) -> io::Result<()> {
    match std::fs::remove_dir_all(dir.join(claim.as_str())) {
        Err(cause) if !matches!(cause.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Err(cause)
        }
        _ => Ok(()),
    }
}
