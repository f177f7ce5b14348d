//! The scenarios, grouped by subject.

mod admission;
mod compute;
mod degraded;
mod examples;
mod failures;
mod foreign;
mod hardware;
mod install;
mod kueue;
mod modes;
mod mps;
mod shares;
mod sharing;
mod upgrade;

use crate::cluster::Cluster;
use anyhow::Result;
use futures::future::LocalBoxFuture;

/// A scenario; its name states the expected behaviour.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) run: for<'a> fn(&'a Cluster) -> LocalBoxFuture<'a, Result<()>>,
}

macro_rules! scenarios {
    ($($module:ident::$name:ident),* $(,)?) => {
        &[$(Scenario { name: stringify!($name), run: |cluster| Box::pin($module::$name(cluster)) }),*]
    };
}

pub(crate) const ALL: &[Scenario] = scenarios![
    sharing::template_gives_each_pod_its_own_mig_instance,
    sharing::pods_share_a_whole_gpu_through_one_claim,
    sharing::cel_selector_on_memory_selects_the_gpu,
    sharing::nvlink_constraint_selects_connected_gpus,
    sharing::first_available_request_takes_first_match,
    sharing::eighth_pod_waits_for_a_free_mig_slice,
    sharing::gpu_switches_between_mig_and_whole,
    sharing::admin_access_does_not_consume_the_gpu,
    sharing::monitoring_agent_sees_gpus_in_use,
    modes::all_modes_run_on_one_node,
    modes::one_gpu_switches_through_every_mode,
    modes::timeslice_slots_exclude_other_modes,
    modes::one_claim_may_mix_modes,
    modes::first_available_list_may_mix_modes,
    mps::mps_serves_clients_of_two_users,
    mps::pods_share_a_claim_with_mps,
    mps::mps_clients_survive_a_node_daemon_kill,
    mps::mps_supervisor_restarts_its_daemons,
    shares::two_shares_of_a_gpu_keep_their_limits,
    shares::two_shares_of_a_mig_instance_keep_their_limits,
    compute::two_shares_get_their_compute_time,
    compute::class_change_applies_to_running_pods,
    compute::high_priority_pod_goes_first,
    shares::shares_run_beside_other_modes,
    shares::process_that_bypasses_the_library_is_killed,
    shares::random_claims_of_every_mode,
    admission::device_plugin_pods_run_unchanged,
    admission::each_mig_profile_has_a_device_class,
    admission::admission_rejects_claims_that_prepare_would_refuse,
    admission::node_daemon_writes_only_its_own_slices,
    admission::claim_status_lists_its_devices,
    admission::gpus_are_tainted_while_a_device_plugin_runs,
    foreign::hami_and_kai_pods_get_shares,
    examples::every_example_runs,
    install::node_configuration_applies_without_restart,
    install::devices_of_a_mode_that_is_off_are_removed,
    failures::node_daemon_recovers_after_a_kill,
    failures::slices_reappear_after_a_kubelet_restart,
    failures::force_deleted_pod_releases_its_gpu,
    failures::force_deleted_pod_keeps_its_gpu_while_it_runs,
    hardware::fatal_xid_taints_the_gpu,
    hardware::plugged_gpu_is_published,
    hardware::containers_restart_during_a_driver_upgrade,
    failures::reboot_with_a_lost_gpu_keeps_claims,
    failures::pods_survive_a_minute_without_api_server,
    install::upgrade_does_not_disturb_pods,
    upgrade::enabling_shares_keeps_running_pods,
    install::uninstall_is_refused_while_claims_exist,
];

/// For an API server without partitionable devices and consumable capacity.
pub(crate) const GATES_OFF: &[Scenario] = scenarios![
    degraded::only_whole_gpus_are_published,
    degraded::existing_mig_instances_are_used,
    degraded::missing_features_are_reported,
    sharing::pods_share_a_whole_gpu_through_one_claim,
    sharing::nvlink_constraint_selects_connected_gpus,
];

/// For an upgrade from an installed older version.
pub(crate) const FROM: &[Scenario] = scenarios![upgrade::upgrade_keeps_running_pods];

/// For a cluster with Kueue.
pub(crate) const KUEUE: &[Scenario] = scenarios![
    kueue::job_waits_for_the_quota_of_shares,
    kueue::job_waits_for_the_quota_of_memory,
    kueue::share_above_the_limit_of_the_team_is_rejected,
];
