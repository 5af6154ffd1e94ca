//! A session with a caller, from the end of the handshake until the caller joins or disconnects.
//! Until then the caller may have to give its permit to another caller; after joining, it is served
//! as a rank.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use racksum_net::quic::lifeline::{Lifeline, dead};
use racksum_net::quic::{Certificate, Role, frames, quinn};
use racksum_proto::control::{CONTROL_VERSION, CallerId, FromAggregator, FromWorker, Join};
use racksum_proto::move_target::MoveTarget;
use racksum_proto::peer_text::Unshown;
use tokio::sync::mpsc::channel;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::admission::admit;
use crate::admit_rule;
use crate::caller_limits::{CallerKey, CallerLimits, Permit};
use crate::control_stream::{ControlReader, JOIN_TIMEOUT, end, send_message};
use crate::handshake::STRANGERS;
use crate::job_move::{self, Operation};
use crate::lifelines::Lifelines;
use crate::paths::{answers_elsewhere, serve_proof};
use crate::quotas::Refusal;
use crate::rank_session::RankSession;
use crate::registry::{Caller, MEMBER_QUEUE, NOT_JOINED, SharedRegistry, lock};
use crate::status::{parts, status};

/// The state that all caller sessions share.
#[derive(Clone)]
pub(crate) struct Server {
    pub(crate) registry: SharedRegistry,
    pub(crate) lifelines: Lifelines,
    pub(crate) limits: CallerLimits,
    /// The address of the control server.
    pub(crate) addr: Option<SocketAddr>,
    /// Set once an operator has asked the aggregator to drain.
    pub(crate) drain_requested: watch::Sender<bool>,
    /// Signals that an authority is no longer trusted.
    pub(crate) authorities_changed: watch::Receiver<()>,
}

/// Serves one caller until it disconnects. Closes the connection if another caller needs the permit
/// before this caller has joined.
pub(crate) async fn serve_caller(connection: quinn::Connection, handshake: Permit, server: Server) {
    let (knows, certificate) = identify(&server.registry, &connection);
    let from = connection.remote_address();
    let key = CallerKey::new(certificate.as_ref().map(|it| &*it.name), from.ip());
    let Some((permit, mut revoked)) = server.limits.unjoined.acquire(key.clone()) else {
        STRANGERS.note(|left_out| {
            tracing::warn!(
                %from,
                left_out,
                "connection closed: too many callers with this identity or address have not joined"
            );
        });
        return connection.close(1u32.into(), BUSY);
    };
    drop(handshake);
    let (departing, mut authorities_changed) =
        (server.limits.departing.clone(), server.authorities_changed.clone());
    let mut session =
        CallerSession { server, connection: &connection, knows, certificate, permit: Some(permit) };
    let turned = tokio::select! {
        turned = session.handle_request() => turned,
        () = revoked.wait() => return connection.close(1u32.into(), BUSY),
        Ok(()) = authorities_changed.changed() => {
            return connection.close(1u32.into(), AUTHORITIES_CHANGED);
        }
    };
    let send = match turned {
        CallerOutcome::Away => return,
        CallerOutcome::Refused(send) => send,
        CallerOutcome::Rank(rank) => {
            match rank.serve(&session.server.registry, &connection).await {
                Some(send) => send,
                None => return,
            }
        }
    };
    // If the caller gets no permit in `departing`, its connection closes immediately.
    if let Some((_permit, mut revoked)) = departing.acquire(key) {
        tokio::select! {
            () = end(&connection, send) => {}
            () = revoked.wait() => {}
        }
    }
}

/// The close reason for a caller that should retry later.
const BUSY: &[u8] = b"too many callers have not joined yet; retry later";

/// The close reason for a caller that must authenticate again.
const AUTHORITIES_CHANGED: &[u8] = b"the aggregator now trusts other authorities; connect again";

/// A caller that has not joined.
struct CallerSession<'a> {
    server: Server,
    connection: &'a quinn::Connection,
    /// Whether callers are identified by their certificates.
    knows: bool,
    certificate: Option<Certificate>,
    /// The permit of a caller that has not joined; `None` once the caller waits for room or has
    /// joined.
    permit: Option<Permit>,
}

/// The outcome of a caller session.
enum CallerOutcome<'a> {
    /// The conversation is over.
    Away,
    /// The caller gave up its permit to wait for room, and then did not join.
    Refused(quinn::SendStream),
    /// The caller has joined as a rank.
    Rank(Box<RankSession<'a>>),
}

impl<'a> CallerSession<'a> {
    /// Handles the caller's request. The future may be dropped at any time before it completes.
    async fn handle_request(&mut self) -> CallerOutcome<'a> {
        let connection = self.connection;
        let first = timeout(JOIN_TIMEOUT, recv_first(connection)).await;
        let Ok(Some((message, send, recv))) = first else { return CallerOutcome::Away };
        let next = match message {
            FromWorker::Prove { version } => {
                serve_proof(connection, &self.server.registry, version, (send, recv)).await
            }
            message => Some((message, send, recv)),
        };
        let Some((message, mut send, recv)) = next else { return CallerOutcome::Away };
        let sent = match message {
            FromWorker::Join(join) => return self.join(join, (send, recv)).await,
            FromWorker::AskPresent(join) => self.send_present(&join, &mut send).await,
            FromWorker::AskStatus { version } => {
                match self.server.addr.filter(|_| version == CONTROL_VERSION) {
                    Some(addr) => self.send_status(addr, &mut send).await,
                    None => {
                        let wrong = FromAggregator::WrongVersion { speaks: CONTROL_VERSION };
                        send_message(&mut send, &wrong).await
                    }
                }
            }
            FromWorker::AskRoom(join) => self.send_room(join, &mut send).await,
            FromWorker::MoveJob { version, job, to } => {
                self.operate(version, Operation::Move(job), to, &mut send).await
            }
            FromWorker::DrainTo { version, to } => {
                self.operate(version, Operation::Drain, to, &mut send).await
            }
            _ => false,
        };
        if sent { self.end(send).await } else { CallerOutcome::Away }
    }

    /// Ends the conversation. A caller that still holds its permit keeps it until the conversation
    /// has ended.
    async fn end(&self, send: quinn::SendStream) -> CallerOutcome<'a> {
        if self.permit.is_none() {
            return CallerOutcome::Refused(send);
        }
        end(self.connection, send).await;
        CallerOutcome::Away
    }

    /// Returns the name in the caller's certificate, if callers are identified by certificates.
    fn identity(&self) -> Option<&str> {
        self.certificate.as_ref().map(|it| &*it.name)
    }

    /// Returns the role in the caller's certificate, if callers are identified by certificates.
    fn role(&self) -> Option<Role> {
        self.certificate.as_ref().map(|it| it.role)
    }

    /// Returns why the caller may not join as a rank, or for other ranks if it `aggregates`; `None`
    /// if it may.
    fn why_not_a_rank(&self, aggregates: bool) -> Option<String> {
        let certificate = self.certificate.as_ref();
        let stranger = if aggregates && self.knows {
            no_aggregator(certificate)
        } else {
            certificate.and_then(no_rank)
        };
        stranger.or_else(|| answers_elsewhere(&self.server.registry, self.connection))
    }

    /// Sends the list of a job's ranks that are present. Returns false if the caller has
    /// disconnected.
    async fn send_present(&self, join: &Join, send: &mut quinn::SendStream) -> bool {
        let registry = &self.server.registry;
        let ranks = match answers_elsewhere(registry, self.connection) {
            Some(_) => Vec::new(),
            None => {
                let asks = (self.identity(), self.connection.remote_address().ip());
                lock(registry).present(join, asks, Instant::now())
            }
        };
        send_message(send, &FromAggregator::Present { ranks }).await
    }

    /// Sends the aggregator's status. Operators and other aggregators see all jobs; workers see the
    /// jobs that the rules let them join. Returns false if the caller has disconnected.
    async fn send_status(&self, addr: SocketAddr, send: &mut quinn::SendStream) -> bool {
        let registry = &self.server.registry;
        let mut status = status(registry, addr).await;
        if !matches!(self.role(), Some(Role::Aggregator | Role::Operator)) {
            let rules = lock(registry).config().admit.clone();
            status.keep_only(|job| admit_rule::check(&rules, self.identity(), job).is_ok());
        }
        let mut parts = parts(&status).into_iter().peekable();
        while let Some(part) = parts.next() {
            let more = parts.peek().is_some();
            if !send_message(send, &FromAggregator::Status { part: Unshown(part), more }).await {
                return false;
            }
        }
        true
    }

    /// Tells a caller whether its join would be admitted now. Returns false if the caller has
    /// disconnected.
    async fn send_room(&self, join: Join, send: &mut quinn::SendStream) -> bool {
        let (registry, ip) = (&self.server.registry, self.connection.remote_address().ip());
        // Only another aggregator may ask for a rank with another identity.
        let identity = match &join.begun_by {
            Some(CallerId::Identity(name)) if self.role() == Some(Role::Aggregator) => {
                Some(Unshown::from(name.clone()).0)
            }
            _ => self.identity().map(str::to_owned),
        };
        let checked = match self.why_not_a_rank(join.aggregates) {
            Some(reason) => Err(Refusal::Never(reason)),
            None => lock(registry).check_space(&join, identity.as_deref(), ip),
        };
        let answer = match checked {
            Ok(()) => FromAggregator::Room,
            // Leave out the advice, which is for ranks.
            Err(Refusal::NoRoom(reason)) => FromAggregator::Refused { reason },
            Err(refusal) => refused(&refusal, refusal.clone().why(), join.rank, false),
        };
        send_message(send, &answer).await
    }

    /// Carries out an operator's request, and sends the outcome. Returns false if the caller has
    /// disconnected.
    async fn operate(
        &self,
        version: u16,
        operation: Operation,
        to: MoveTarget,
        send: &mut quinn::SendStream,
    ) -> bool {
        let Some(addr) = self.server.addr.filter(|_| version == CONTROL_VERSION) else {
            let wrong = FromAggregator::WrongVersion { speaks: CONTROL_VERSION };
            return send_message(send, &wrong).await;
        };
        let (registry, drain) = (&self.server.registry, &self.server.drain_requested);
        let (by, from) = (self.identity(), self.connection.remote_address());
        let done = match self.check_operator() {
            Ok(()) => {
                tracing::info!(%from, by, ?operation, %to, "an operator asks to move jobs");
                let request = (operation, to);
                tokio::select! {
                    moved = job_move::start(Arc::clone(registry), drain.clone(), addr, request) => {
                        moved
                    }
                    _ = self.connection.closed() => return false,
                }
            }
            Err(reason) => Err(reason),
        };
        let answer = match done {
            Ok(jobs) => FromAggregator::Moved { jobs },
            Err(reason) => {
                STRANGERS.note(|left_out| {
                    tracing::warn!(%from, by, reason, left_out, "jobs are not moved");
                });
                FromAggregator::Refused { reason }
            }
        };
        send_message(send, &answer).await
    }

    /// Checks that the caller may move jobs: an aggregator decides who reads and sums the ranks'
    /// data.
    fn check_operator(&self) -> Result<(), String> {
        let (local, remote) = (self.connection.local_ip(), self.connection.remote_address().ip());
        let is_here = remote.to_canonical().is_loopback() || local == Some(remote);
        match &self.certificate {
            Some(certificate) if certificate.role == Role::Operator => Ok(()),
            None if !self.knows && is_here => Ok(()),
            None if !self.knows => Err(format!(
                "this aggregator has no identities, so only a caller on its own host may move \
                 jobs, not one at {remote}; run the command there, or start all nodes with \
                 identities"
            )),
            Some(Certificate { name, role, .. }) => Err(format!(
                "{name:?} has role {role}, but only an identity with the role operator may move \
                 jobs; issue one with `racksum identity issue NAME --role operator`"
            )),
            None => Err("the caller has no identity; set `identity`".into()),
        }
    }

    /// Admits a rank to its job, or sends the reason for the refusal.
    async fn join(
        &mut self,
        join: Join,
        (mut send, recv): (quinn::SendStream, quinn::RecvStream),
    ) -> CallerOutcome<'a> {
        let (outbox, inbox) = channel(MEMBER_QUEUE);
        let (connection, addr) = (self.connection, self.connection.remote_address());
        let (name, rank, aggregates) = (join.job.clone(), join.rank, join.aggregates);
        let mut reader = ControlReader::of(recv);
        let offered = offer(&self.server.lifelines, &mut send).await;
        let Ok(lifeline) = offered else { return CallerOutcome::Away };
        let mut dead: Pin<Box<dyn Future<Output = ()> + Send + 'a>> =
            Box::pin(dead(connection, lifeline));
        let registry = &self.server.registry;
        let identity = self.identity().map(str::to_owned);
        let joined = match self.why_not_a_rank(aggregates) {
            Some(reason) => Err(Refusal::Never(reason)),
            None => {
                let caller = Caller { identity: identity.clone(), addr, outbox };
                let streams = (&mut send, &mut reader);
                let entered = tokio::select! {
                    entered = admit(registry, streams, &mut self.permit, join, caller) => entered,
                    () = &mut dead => return CallerOutcome::Away,
                    _ = connection.closed() => return CallerOutcome::Away,
                };
                match entered {
                    Some(joined) => joined,
                    None => return self.end(send).await,
                }
            }
        };
        match joined {
            Err(refusal) => {
                let reason = refusal.clone().why();
                NOT_JOINED.note(|left_out| {
                    let job = &name;
                    tracing::warn!(?job, rank, %addr, identity, reason, left_out, "join refused");
                });
                let refused = refused(&refusal, reason, rank, aggregates);
                if send_message(&mut send, &refused).await {
                    self.end(send).await
                } else {
                    CallerOutcome::Away
                }
            }
            Ok((seat, joined)) => {
                self.permit = None;
                tracing::info!(job = ?name, rank, %addr, identity, "rank joined");
                CallerOutcome::Rank(Box::new(RankSession {
                    seat,
                    joined,
                    send,
                    reader,
                    inbox,
                    dead,
                }))
            }
        }
    }
}

/// Returns the message that reports a refusal to the rank.
fn refused(refusal: &Refusal, reason: String, rank: u16, aggregates: bool) -> FromAggregator {
    match refusal {
        Refusal::Draining => FromAggregator::Drain,
        // Refuse only this rank, so that the aggregator can call again for its other ranks.
        Refusal::Never(_) | Refusal::WrongVersion(_) if aggregates => {
            FromAggregator::RefusedRank { rank, reason }
        }
        Refusal::WrongVersion(_) => FromAggregator::WrongVersion { speaks: CONTROL_VERSION },
        Refusal::Never(_) | Refusal::NoRoom(_) | Refusal::NoWait(_) => {
            FromAggregator::Refused { reason }
        }
    }
}

/// Returns whether callers are identified by certificates and, if so, this caller's certificate.
fn identify(
    registry: &SharedRegistry,
    connection: &quinn::Connection,
) -> (bool, Option<Certificate>) {
    let knows = lock(registry).knows_identities();
    (knows, knows.then(|| Certificate::of_peer(connection)).flatten())
}

/// Returns why the holder of a certificate may not join as a rank, or `None` if it may.
fn no_rank(Certificate { name, role, .. }: &Certificate) -> Option<String> {
    (*role == Role::Operator).then(|| {
        format!(
            "{name:?} has role operator, which joins no jobs; issue an identity for the rank with \
             `racksum identity issue NAME --role worker`"
        )
    })
}

/// Returns why a caller may not join on behalf of other ranks, or `None` if it may.
fn no_aggregator(certificate: Option<&Certificate>) -> Option<String> {
    let Some(Certificate { name, role, .. }) = certificate else {
        return Some(
            "a caller that joins for other ranks must have an identity with the role aggregator; \
             issue one with `racksum identity issue NAME --role aggregator`"
                .into(),
        );
    };
    let it = (*role != Role::Aggregator).then_some(role)?;
    Some(format!(
        "{name:?} has role {it}, but only an identity with the role aggregator may join for other \
         ranks; issue one with `racksum identity issue NAME --role aggregator`"
    ))
}

/// Offers a rank a lifeline. Returns a future that yields the lifeline once the rank has claimed
/// it. An error means that the rank has disconnected.
async fn offer(
    lifelines: &Lifelines,
    send: &mut quinn::SendStream,
) -> Result<impl Future<Output = Lifeline> + use<>, ()> {
    let offered = lifelines.offer();
    if let Some((token, port, _)) = &offered {
        let (token, port) = (*token, *port);
        if !send_message(send, &FromAggregator::Lifeline { port, token }).await {
            return Err(());
        }
    }
    Ok(async move {
        let laid = match offered {
            Some((.., laid)) => laid.await.ok(),
            None => None,
        };
        laid.map_or(Lifeline::Impossible, Lifeline::Laid)
    })
}

/// Receives the first message of a connection, with the stream that carried it.
async fn recv_first(
    connection: &quinn::Connection,
) -> Option<(FromWorker, quinn::SendStream, quinn::RecvStream)> {
    let (send, mut recv) = connection.accept_bi().await.ok()?;
    Some((frames::recv(&mut recv).await.ok()??, send, recv))
}
