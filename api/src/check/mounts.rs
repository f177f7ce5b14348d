//! Volumes that a pod with a share must not mount: they would cover the pages or the library that
//! enforce its limits.
//!
//! Those are single files below [`DIVVY_DIR`] and at [`PRELOAD_FILE`], mounted over the image. A volume at
//! such a path would be below or above them. A volume at a parent directory contains their mount
//! points, and unlinking a mount point from another container removes the mount (`detach_mounts` in
//! the kernel). So no other container may mount such a volume. Links of the image can redirect
//! other paths there; the node detects that in the mountinfo of the container.

use super::types::Finding;
use k8s_openapi::api::core::v1::{Container, PodSpec, Volume};
use std::collections::BTreeSet;

/// Directory of pages and libraries in a container.
const DIVVY_DIR: &str = "/run/divvy";
/// The file that makes the dynamic linker load the library.
const PRELOAD_FILE: &str = "/etc/ld.so.preload";
/// A link to `/run` in most images.
const VAR_RUN: &str = "/var/run";

/// Checks the volumes of a pod. `containers` have their paths; `shares` are the claims of the pod
/// that have, or may have, a share.
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
        let path = volume.host_path.as_ref().map(|host| normalize(&host.path));
        if path.as_deref().map(resolve_var_run).is_some_and(|path| within(&path, DIVVY_DIR)) {
            let message = "the pod uses a share, and this is the directory of the pages of shares on the \
                 node; remove the volume";
            findings.push(Finding::error(format!("spec.volumes[{index}].hostPath.path"), message));
        }
    }
    for (path, container) in containers {
        let name = &container.name;
        let claims = container.resources.iter().flat_map(|resources| resources.claims.iter().flatten());
        let shares = claims.into_iter().any(|claim| shares.contains(claim.name.as_str()));
        let mut report = |path: String, place: &str, why: &str| {
            let message = format!("container {name} mounts a volume at {place}, {why}");
            findings.push(Finding::error(path, message));
        };
        let reason = "where the files that enforce share limits are mounted; remove the volume";
        for (index, device) in container.volume_devices.iter().flatten().enumerate() {
            if within(&resolve_var_run(&normalize(&device.device_path)), DIVVY_DIR) {
                report(format!("{path}.volumeDevices[{index}].devicePath"), &device.device_path, reason);
            }
        }
        for (index, mount) in container.volume_mounts.iter().flatten().enumerate() {
            let place = resolve_var_run(&normalize(&mount.mount_path));
            let path = format!("{path}.volumeMounts[{index}].mountPath");
            if within(&place, DIVVY_DIR) || (shares && within(&place, PRELOAD_FILE)) {
                report(path, &mount.mount_path, reason);
            } else if shares
                && [DIVVY_DIR, PRELOAD_FILE].iter().any(|ours| within(ours, &place))
                && !is_own(spec, containers, container, &mount.name)
            {
                let why = "above the files that enforce the limits of its share, and others can access that \
                     volume; use an emptyDir that no other container mounts, or mount it elsewhere";
                report(path, &mount.mount_path, why);
            }
        }
    }
    findings
}

/// Whether only this container mounts the volume, and it is an emptyDir.
fn is_own(spec: &PodSpec, containers: &[(String, &Container)], container: &Container, name: &str) -> bool {
    let empty = |volume: &Volume| volume.name == name && volume.empty_dir.is_some();
    let mounts = |other: &Container| {
        other.name != container.name && other.volume_mounts.iter().flatten().any(|mount| mount.name == name)
    };
    spec.volumes.iter().flatten().any(empty) && !containers.iter().any(|(_, other)| mounts(other))
}

/// Whether a path is in a directory or is the directory; both normalized by [`normalize`].
fn within(path: &str, directory: &str) -> bool {
    let directory = directory.trim_end_matches('/');
    path.strip_prefix(directory).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The path after the link that most images have.
fn resolve_var_run(path: &str) -> String {
    match within(path, VAR_RUN) {
        true => format!("/run{}", &path[VAR_RUN.len()..]),
        false => path.to_owned(),
    }
}

/// A path without empty, `.` and `..` components.
pub(super) fn normalize(path: &str) -> String {
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
