"""What handlers work with, kept with the application."""

import threading
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from autotune.service.auth import Auth
from autotune.service.commands import Commands
from autotune.service.queries import Queries
from autotune.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Services:
    """Made once by `create_app`.

    Attributes:
        stopping: set when the server is about to stop; open streams end then.
    """

    settings: Settings
    queries: Queries
    commands: Commands
    auth: Auth
    stopping: threading.Event = field(default_factory=threading.Event)


def get_services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


def _queries(services: Annotated[Services, Depends(get_services)]) -> Queries:
    return services.queries


def _commands(services: Annotated[Services, Depends(get_services)]) -> Commands:
    return services.commands


ServicesDep = Annotated[Services, Depends(get_services)]
QueriesDep = Annotated[Queries, Depends(_queries)]
CommandsDep = Annotated[Commands, Depends(_commands)]
