//! The gRPC services for the kubelet: plugin registration, DRA and device health. Also the client of
//! its pod-resources API.

pub mod health;
pub mod pod_resources;
pub mod registration;
pub mod service;
