//! Access to the API server: events, claims' consumers and status, DeviceClasses, the Node, and the node
//! configuration.

pub mod claim_status;
pub mod classes;
pub mod consumers;
pub mod device_plugin;
pub mod driver_upgrade;
pub mod events;
pub mod node_config;
pub mod node_object;
pub mod removals;
