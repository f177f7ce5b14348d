//! Fakes of the two Kubernetes programs that a node daemon talks to, at their real interfaces: the
//! kubelet's gRPC over Unix sockets, and the API server's HTTP over TLS. They implement what the
//! tests and the demo need. Where a fake differs from the real program, the fake is wrong.

pub mod apiserver;
pub mod kubelet;
