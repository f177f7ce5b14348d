//! Stand-ins for the two Kubernetes programs that a node daemon talks to, at
//! their real boundary: the kubelet's gRPC over Unix sockets, the API server's
//! HTTP over TLS. They are as large as the tests and the demo need, and where
//! they and the real thing differ, they are wrong.

pub mod apiserver;
pub mod kubelet;
