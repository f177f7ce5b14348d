//! What a pod with a share may not mount: anything that would take the place of
//! the pages and the library that keep its limits.
//!
//! They are single files, mounted over what the image has, below [`ROOT`] and at
//! [`PRELOAD`]. A volume at such a path would lie under them or over them,
//! whichever comes last. A volume at a directory above them carries the mount
//! points, and whoever unlinks a mount point from another container takes the
//! mount away with it (`detach_mounts` of the kernel), so such a volume must be
//! nobody else's.
//!
//! The image's own links can lead other paths there; that is for the node to see,
//! in the container's mountinfo.

use super::Finding;
use k8s_openapi::api::core::v1::{Container, PodSpec, Volume};
use std::collections::BTreeSet;

/// Where pages and libraries lie in a container.
const ROOT: &str = "/run/divvy";
/// What makes the dynamic linker load the library.
const PRELOAD: &str = "/etc/ld.so.preload";
/// `/var/run` is a link to `/run` in most images.
const VAR_RUN: &str = "/var/run";

/// Checks the volumes of a pod. `containers` have their paths; `shares` names the
/// claims of the pod that have, or may have, a share.
pub(super) fn check(
    spec: &PodSpec,
    containers: &[(String, &Container)],
    shares: &BTreeSet<&str>,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    if shares.is_empty() {
        return findings;
    }
    for (index, volume) in spec.volumes.iter().flatten().enumerate() {
        let path = volume.host_path.as_ref().map(|host| plain(&host.path));
        if path.as_deref().map(really).is_some_and(|path| within(&path, ROOT)) {
            let message = "the pod uses a share, and the volume is where the node keeps the pages of shares; remove the volume";
            findings.push(Finding::error(format!("spec.volumes[{index}].hostPath.path"), message));
        }
    }
    for (path, container) in containers {
        let name = &container.name;
        let claims = container.resources.iter().flat_map(|resources| resources.claims.iter().flatten());
        let shares = claims.into_iter().any(|claim| shares.contains(claim.name.as_str()));
        let mut tell = |path: String, place: &str, why: &str| {
            let message = format!("container {name} mounts a volume at {place}, {why}");
            findings.push(Finding::error(path, message));
        };
        let kept = "where the limits of shares are kept; remove the volume";
        for (index, device) in container.volume_devices.iter().flatten().enumerate() {
            if within(&really(&plain(&device.device_path)), ROOT) {
                tell(format!("{path}.volumeDevices[{index}].devicePath"), &device.device_path, kept);
            }
        }
        for (index, mount) in container.volume_mounts.iter().flatten().enumerate() {
            let place = really(&plain(&mount.mount_path));
            let path = format!("{path}.volumeMounts[{index}].mountPath");
            if within(&place, ROOT) || (shares && within(&place, PRELOAD)) {
                tell(path, &mount.mount_path, kept);
            } else if shares
                && [ROOT, PRELOAD].iter().any(|ours| within(ours, &place))
                && !is_own(spec, containers, container, &mount.name)
            {
                let why = "below which the limits of its share are kept, and others reach that volume; use an emptyDir that no other container mounts, or mount it elsewhere";
                tell(path, &mount.mount_path, why);
            }
        }
    }
    findings
}

/// Whether nobody but this container reaches a volume.
fn is_own(spec: &PodSpec, containers: &[(String, &Container)], container: &Container, name: &str) -> bool {
    let empty = |volume: &Volume| volume.name == name && volume.empty_dir.is_some();
    let mounts = |other: &Container| {
        other.name != container.name && other.volume_mounts.iter().flatten().any(|mount| mount.name == name)
    };
    spec.volumes.iter().flatten().any(empty) && !containers.iter().any(|(_, other)| mounts(other))
}

/// Whether a path is a directory, or below it; both as [`plain`] has them.
fn within(path: &str, directory: &str) -> bool {
    let directory = directory.trim_end_matches('/');
    path.strip_prefix(directory).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The path behind the link that most images have.
fn really(path: &str) -> String {
    match within(path, VAR_RUN) {
        true => format!("/run{}", &path[VAR_RUN.len()..]),
        false => path.to_owned(),
    }
}

/// A path without what means nothing in it.
pub(super) fn plain(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    format!("/{}", parts.join("/"))
}
