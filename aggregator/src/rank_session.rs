//! The session of a rank that has joined: its control connection, until the rank and its job part.

use std::ops::ControlFlow;
use std::pin::Pin;
use std::sync::Arc;

use racksum_net::quic::quinn;
use racksum_proto::control::{FromAggregator, FromWorker};
use racksum_proto::ids::OpId;
use racksum_proto::loss::Loss;
use tokio::sync::mpsc::Receiver;
use tokio::time::{Instant, interval};

use crate::control_stream::{ControlReader, WAITING_PERIOD, send_message};
use crate::multicast_ping::ping;
use crate::parent_session::call;
use crate::registry::{Joined, Seat, SharedRegistry, lock, settle};

/// The session of a rank that has joined.
pub(crate) struct RankSession<'a> {
    pub(crate) seat: Seat,
    pub(crate) joined: Joined,
    pub(crate) send: quinn::SendStream,
    pub(crate) reader: ControlReader,
    pub(crate) inbox: Receiver<FromAggregator>,
    /// Completes once the rank has died.
    pub(crate) dead: Pin<Box<dyn Future<Output = ()> + Send + 'a>>,
}

impl RankSession<'_> {
    /// Serves the rank until it leaves its job or the job ends. Returns the stream for the last
    /// messages to the rank, or `None` if the rank is lost.
    pub(crate) async fn serve(
        self: Box<Self>,
        registry: &SharedRegistry,
        connection: &quinn::Connection,
    ) -> Option<quinn::SendStream> {
        let Self { seat, joined, mut send, mut reader, mut inbox, dead } = *self;
        take_next_step(registry, &seat, joined);
        let streams = (&mut send, &mut reader);
        let parting = tokio::select! {
            parting = pass_messages(registry, &seat, connection, streams, &mut inbox) => parting,
            () = dead => Parting::Lost(Loss::Died),
        };
        note_parting(registry, &seat, parting, connection).await;
        (!matches!(parting, Parting::Lost(_))).then_some(send)
    }
}

/// Reports to the registry how a rank and its job parted.
async fn note_parting(
    registry: &SharedRegistry,
    seat: &Seat,
    parting: Parting,
    connection: &quinn::Connection,
) {
    let now = Instant::now();
    match parting {
        Parting::Over => {}
        Parting::Moved => lock(registry).depart(seat, now),
        Parting::Left(next_op) => lock(registry).part(seat, next_op, now),
        Parting::Retreated => lock(registry).retreat(seat, now),
        Parting::Lost(why) => {
            let is_silent = why == Loss::Broke && timed_out(connection);
            let why = if is_silent { Loss::Silent } else { why };
            let ending = lock(registry).ending_by_loss(seat, why, now);
            let _fence = settle(registry, ending).await;
            lock(registry).leave(seat, why, Instant::now());
        }
    }
}

/// Returns whether a connection ended because the peer was silent for too long.
fn timed_out(connection: &quinn::Connection) -> bool {
    matches!(connection.close_reason(), Some(quinn::ConnectionError::TimedOut))
}

/// How a rank and its job parted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parting {
    /// The rank is lost.
    Lost(Loss),
    /// The rank has left. It may rejoin at this op, or not at all if there is no op.
    Left(Option<OpId>),
    /// The rank has rejoined, and leaves again before it has done anything.
    Retreated,
    /// The rank continues its job at another aggregator.
    Moved,
    /// The job is over, and the rank was told why.
    Over,
}

/// Passes messages both ways until the rank and its job part.
async fn pass_messages(
    registry: &SharedRegistry,
    seat: &Seat,
    connection: &quinn::Connection,
    (send, reader): (&mut quinn::SendStream, &mut ControlReader),
    inbox: &mut Receiver<FromAggregator>,
) -> Parting {
    let joined = Instant::now();
    let mut tick = interval(WAITING_PERIOD);
    let mut received_before = 0;
    loop {
        tokio::select! {
            message = inbox.recv() => {
                let Some(message) = message else { break Parting::Over };
                if !send_message(send, &message).await {
                    break Parting::Lost(Loss::Broke);
                }
            }
            message = reader.next() => {
                let Some(message) = message else { break Parting::Lost(Loss::Broke) };
                let handled = handle_message(registry, seat, send, message).await;
                if let ControlFlow::Break(parting) = handled {
                    break parting;
                }
            }
            now = tick.tick() => {
                let received = connection.stats().udp_rx.datagrams;
                if std::mem::replace(&mut received_before, received) != received {
                    lock(registry).note_received(seat, now);
                }
                let next_step = lock(registry).check_timeouts(seat, now);
                if let Joined::Waiting(missing) = next_step {
                    let waited = now.saturating_duration_since(joined);
                    let waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
                    if !send_message(send, &FromAggregator::Waiting { missing, waited_ms }).await {
                        break Parting::Lost(Loss::Broke);
                    }
                } else {
                    take_next_step(registry, seat, next_step);
                }
            }
        }
    }
}

/// Handles a message from a member.
async fn handle_message(
    registry: &SharedRegistry,
    seat: &Seat,
    send: &mut quinn::SendStream,
    message: FromWorker,
) -> ControlFlow<Parting> {
    const BROKE: ControlFlow<Parting> = ControlFlow::Break(Parting::Lost(Loss::Broke));
    match message {
        FromWorker::PingArrived => lock(registry).handle_ping_arrived(seat),
        FromWorker::AddRank(join) => {
            let joined = lock(registry).also(seat, join, Instant::now());
            let Some(joined) = joined else { return BROKE };
            take_next_step(registry, seat, joined);
        }
        FromWorker::RankLost(absent) if lock(registry).is_only(seat, absent.rank) => {
            return ControlFlow::Break(Parting::Lost(loss_of_only(absent.why)));
        }
        FromWorker::RankLost(absent) => {
            if !lock(registry).may_part(seat, absent.rank) {
                return BROKE;
            }
            let ending = lock(registry).ending_below(seat, absent.why);
            let _fence = settle(registry, ending).await;
            lock(registry).parted(seat, absent);
        }
        FromWorker::Counters(counters) => lock(registry).note_counters(seat, counters),
        FromWorker::Leave { next_op } => return ControlFlow::Break(Parting::Left(next_op)),
        FromWorker::CancelRejoin => return ControlFlow::Break(Parting::Retreated),
        FromWorker::Withdraw => {
            let is_free = lock(registry).withdraw(seat);
            if is_free && !send_message(send, &FromAggregator::MayLeave).await {
                return BROKE;
            }
        }
        FromWorker::Stay => {
            let joined = lock(registry).stay(seat);
            take_next_step(registry, seat, joined);
        }
        FromWorker::MayMove { may_move } => lock(registry).handle_may_move(seat, may_move),
        FromWorker::MovePrepared { number } => lock(registry).handle_move_prepared(seat, number),
        FromWorker::CannotMove { number, reason } => {
            lock(registry).handle_cannot_move(seat, number, reason)
        }
        FromWorker::Move => return ControlFlow::Break(Parting::Moved),
        FromWorker::Prove { .. }
        | FromWorker::AskPingSizes
        | FromWorker::Join(_)
        | FromWorker::AskPresent(_)
        | FromWorker::AskStatus { .. }
        | FromWorker::AskRoom(_)
        | FromWorker::MoveJob { .. }
        | FromWorker::DrainTo { .. }
        | FromWorker::Stop => return BROKE,
    }
    ControlFlow::Continue(())
}

/// Returns why a member lost its only rank, according to the member's own report. A report of a
/// lost aggregator counts as a broken connection, since such a member has no aggregator below it.
const fn loss_of_only(reported: Loss) -> Loss {
    match reported {
        Loss::Aggregator => Loss::Broke,
        // A rank may report with `RankLost`, instead of `Leave`, that it leaves.
        Loss::Died | Loss::Silent | Loss::Broke | Loss::Left => reported,
    }
}

/// Starts the next step of a job.
fn take_next_step(registry: &SharedRegistry, seat: &Seat, joined: Joined) {
    let (registry, seat) = (Arc::clone(registry), seat.clone());
    match joined {
        Joined::Ping => drop(tokio::spawn(ping(registry, seat))),
        Joined::CallParent => drop(tokio::spawn(call(registry, seat))),
        Joined::Waiting(_) | Joined::Ready => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_with_one_rank_has_no_aggregator_below_to_lose() {
        let reported = [Loss::Died, Loss::Silent, Loss::Broke, Loss::Left, Loss::Aggregator];
        let taken = [Loss::Died, Loss::Silent, Loss::Broke, Loss::Left, Loss::Broke];
        assert_eq!(reported.map(loss_of_only), taken);
    }
}
