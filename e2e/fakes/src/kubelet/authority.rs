//! Calls of the registration socket with the `:authority` header that the kubelet sends.
//!
//! The kubelet's gRPC library sends the percent-encoded socket path. A server built on the `http`
//! crate refuses such a host (RST_STREAM, PROTOCOL_ERROR), unless the path contains an `@`: the
//! part before it is user information, where percent-encoding is legal. If the `http` crate cannot
//! express the authority, the request is sent as raw bytes.

use divvy_kubelet::registration::registration_client::RegistrationClient;
use divvy_kubelet::registration::{InfoRequest, PluginInfo, RegistrationStatus};
use std::path::Path;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tonic::codegen::http::uri::{Authority, Uri};
use tonic::transport::Endpoint;

const DIAL_TIMEOUT: Duration = Duration::from_secs(10);
const GET_INFO_TIMEOUT: Duration = Duration::from_secs(1);
const NOTIFY_TIMEOUT: Duration = Duration::from_secs(5);

/// Encodes like grpc-go: characters that RFC 3986 allows in an authority stay, others become `%XX`.
pub fn encode_authority(path: &str) -> String {
    let mut out = String::new();
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:[]@".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

/// Calls GetInfo on a registration socket, with the authority that the kubelet sends.
pub async fn get_info(socket: &Path) -> Result<PluginInfo, String> {
    let mut client = dial(socket).await?;
    let answer = tokio::time::timeout(GET_INFO_TIMEOUT, client.get_info(InfoRequest {})).await;
    let info = answer.map_err(|_| "GetInfo did not answer within 1 s".to_owned())?;
    Ok(info.map_err(|status| format!("GetInfo: {status}"))?.into_inner())
}

pub(super) async fn notify(socket: &Path, status: RegistrationStatus) -> Result<(), String> {
    let mut client = dial(socket).await?;
    let answer = tokio::time::timeout(NOTIFY_TIMEOUT, client.notify_registration_status(status)).await;
    answer
        .map_err(|_| "NotifyRegistrationStatus did not answer within 5 s".to_owned())?
        .map_err(|status| format!("NotifyRegistrationStatus: {status}"))?;
    Ok(())
}

async fn dial(socket: &Path) -> Result<RegistrationClient<tonic::transport::Channel>, String> {
    let authority = encode_authority(&socket.to_string_lossy());
    if authority.parse::<Authority>().is_err() {
        return Err(probe(socket, &authority).await);
    }
    let origin = Uri::builder().scheme("http").authority(authority).path_and_query("/").build();
    let endpoint = Endpoint::from_static("http://localhost").origin(origin.map_err(|err| err.to_string())?);
    let socket = socket.to_owned();
    let channel = endpoint.connect_with_connector(super::plugin::unix(socket, None));
    let channel =
        tokio::time::timeout(DIAL_TIMEOUT, channel).await.map_err(|_| "dial timed out".to_owned())?;
    Ok(RegistrationClient::new(channel.map_err(|err| format!("dial: {err}"))?))
}

/// Sends `GetInfo` as raw bytes, and returns how the server ended the stream.
async fn probe(socket: &Path, authority: &str) -> String {
    match tokio::time::timeout(GET_INFO_TIMEOUT, probe_stream(socket, authority)).await {
        Err(_) => "GetInfo did not answer within 1 s".to_owned(),
        Ok(Err(err)) => format!("GetInfo: {err}"),
        Ok(Ok(code)) => format!("GetInfo: stream terminated by RST_STREAM with error code {code}"),
    }
}

async fn probe_stream(socket: &Path, authority: &str) -> std::io::Result<u32> {
    const HEADERS: u8 = 1;
    const RST_STREAM: u8 = 3;
    const SETTINGS: u8 = 4;
    const END_STREAM: u8 = 1;
    const END_HEADERS: u8 = 4;
    let mut stream = UnixStream::connect(socket).await?;
    let mut out = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    out.extend(frame(SETTINGS, 0, 0, &[]));
    let mut block = Vec::new();
    for (name, value) in [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/pluginregistration.Registration/GetInfo"),
        (":authority", authority),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ] {
        // HPACK: a literal without indexing, with a new name and uncompressed strings.
        block.push(0);
        literal(&mut block, name);
        literal(&mut block, value);
    }
    out.extend(frame(HEADERS, END_HEADERS, 1, &block));
    out.extend(frame(0, END_STREAM, 1, &[0; 5]));
    stream.write_all(&out).await?;
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await?;
        let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
        let mut payload = vec![0; length];
        stream.read_exact(&mut payload).await?;
        match (head[3], <[u8; 4]>::try_from(payload.as_slice())) {
            (RST_STREAM, Ok(code)) => return Ok(u32::from_be_bytes(code)),
            (HEADERS, _) => return Err(std::io::Error::other("the server accepted the request")),
            _ => {}
        }
    }
}

fn literal(block: &mut Vec<u8>, text: &str) {
    // Lengths from 127 on continue in groups of seven bits.
    let mut rest = text.len();
    if rest < 127 {
        block.push(rest as u8);
    } else {
        block.push(127);
        rest -= 127;
        while rest >= 128 {
            block.push((rest % 128 + 128) as u8);
            rest /= 128;
        }
        block.push(rest as u8);
    }
    block.extend(text.as_bytes());
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    let mut out = vec![length[1], length[2], length[3], kind, flags];
    out.extend(stream.to_be_bytes());
    out.extend(payload);
    out
}
