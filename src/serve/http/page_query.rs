//! Queries of pages: extractors that respond before a page is built, with status 400 if a parameter is invalid.
//!
//! The parameters of a page, with their defaults and maxima, are in the `...Query` beside its report.

use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequestParts, Query};
use axum::http::request::Parts;
use axum::response::Response;
use serde::de::DeserializeOwned;

use super::app_state::AppState;
use super::response::{respond_bad_query, respond_metrics_off};

/// Query of a page; an invalid one is responded to with status 400.
pub(super) struct PageQuery<Q>(pub(super) Q);

/// Query of a page about counts: as [`PageQuery`], and status 503 if nothing is counted.
pub(super) struct CountsPageQuery<Q>(pub(super) Q);

impl<Q: DeserializeOwned> FromRequestParts<AppState> for PageQuery<Q> {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _: &AppState) -> Result<Self, Self::Rejection> {
        let query: Result<Query<Q>, QueryRejection> = Query::try_from_uri(&parts.uri);
        query.map(|Query(query)| Self(query)).map_err(|rejection| respond_bad_query(&rejection))
    }
}

impl<Q: DeserializeOwned> FromRequestParts<AppState> for CountsPageQuery<Q> {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, Self::Rejection> {
        let PageQuery(query) = PageQuery::from_request_parts(parts, state).await?;
        match state.collector.service.decider.metrics.is_off() {
            true => Err(respond_metrics_off()),
            false => Ok(Self(query)),
        }
    }
}
