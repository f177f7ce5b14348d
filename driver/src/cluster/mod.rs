//! Access to the API server: events, claim status, DeviceClasses, the Node, and the node configuration.

pub mod claim_status;
pub mod classes;
pub mod device_plugin;
pub mod driver_upgrade;
pub mod events;
pub mod node_config;
pub mod node_object;
