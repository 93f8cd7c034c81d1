"""Ray's token authentication, as far as kvferry has to do with it: whether this process shows a token, and whether a cluster wants one.

Ray reads, keeps and sends the token; nothing here does.
"""

import logging
import os

import grpc

from kvferry.errors import ConfigurationError

ANY_CALL = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
ASK_TIMEOUT_S = 5.0


def show_token() -> None:
    """To a cluster that is reached by ray://, if the user has one and does not say otherwise: as Ray itself does for `auto`.

    Whoever connects so runs what that cluster sends: it is trusted already.
    """
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

    logging.getLogger("ray").setLevel(logging.ERROR)
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def check_wants_token(address: str) -> None:
    """Raises ConfigurationError if the control store there answers without one."""
    with grpc.insecure_channel(address, (("grpc.enable_http_proxy", 0),)) as channel:
        try:
            channel.unary_unary(ANY_CALL)(b"", timeout=ASK_TIMEOUT_S)
        except grpc.RpcError:
            return
    raise ConfigurationError(
        f"the Ray at {address} wants no token: whoever reaches it can run code there and read the deployment's secret. Begin it "
        "with one (`ray get-auth-token --generate` once, the same ~/.ray/auth_token on every node, RAY_AUTH_MODE=token for "
        "`ray start`; no RAY_AUTH_MODE=disabled), or say --open-ray if nobody else reaches it"
    )


def refused(what: str, said: str) -> ConfigurationError:
    """Why a token, or none, was not enough there."""
    return ConfigurationError(f"cannot use {what}: {said}. {_words()}")


def _words() -> str:
    if os.environ.get("RAY_AUTH_MODE", "") == "token":
        return "RAY_AUTH_MODE is token: this user's token may not be the cluster's (`ray get-auth-token` shows which one is used)"
    return (
        "If the cluster wants a token, set RAY_AUTH_MODE=token; --address auto and ray:// do that by themselves where this user "
        "has one (~/.ray/auth_token, or RAY_AUTH_TOKEN)"
    )
