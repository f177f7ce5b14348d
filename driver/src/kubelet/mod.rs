//! The gRPC services for the kubelet: plugin registration, DRA and device health.

pub mod health;
pub mod registration;
pub mod service;
